"""Starts lmkv and the systems that it is compared with.

`lmcache_*` and `memcpy_offload` run in processes of the other systems, and import nothing of lmkv.
"""
