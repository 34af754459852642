"""The host tier: chunks in the pool, their allocator, eviction policy and pins, and the warm start.

The bottom package of the node. Start with `host.HostTier`.
"""
