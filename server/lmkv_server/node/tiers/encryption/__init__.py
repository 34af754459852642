"""Encryption of chunks at rest, for tiers that keep them outside of memory (docs/operate/security.md).

`header` is the format; `cipher`, the only module that imports `cryptography`, has the algorithms, `keys` those of this
node's tenant. Start with `chunks.ChunkEncryption`, which each tier has one of.
"""
