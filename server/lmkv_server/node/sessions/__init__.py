"""Attached engines: their sessions, lookup leases and write grants.

Used by `engines`, `commands`, `handoff` and `serving`; imports `cache`. Start with `session.EngineSession`.
"""
