"""Selects the engine of a request: health checks, prefix lookups, policies, session affinity, failover.

Imports `upstream` and below. Start with `pools.EnginePool`.
"""
