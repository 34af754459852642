"""Chooses the engine for a request: known engines and their health, prefix lookups, policies, session affinity.

Start with `engines.Fleet`.
"""
