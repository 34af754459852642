"""The shared-memory pool: memory behind a file descriptor that a node owns and the workers of engines map.

`pool` maps memory, `file` keeps it across restarts, `socket` passes it to workers, `memory` and `numa` choose pages and
NUMA nodes. Imports `lmkv.pool.socket`, `lmkv.runtime` and `lmkv.errors`. Start with `pool.Pool`.
"""
