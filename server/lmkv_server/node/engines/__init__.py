"""`EngineService`: what engines on this host call. Handlers translate; `sessions` and `stack` do the work.

Start with `service.EngineService`.
"""
