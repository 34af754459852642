"""The connector's worker side: copies between the engine's pages and the pool.

Start with `side.WorkerSide`.
"""
