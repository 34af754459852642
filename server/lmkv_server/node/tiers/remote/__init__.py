"""The remote tier: a store that all nodes share (Valkey or Redis, S3, or a folder).

`store` is the contract of a store, `valkey`, `s3` and `folder` implement it. Start with `tier.RemoteTier`.
"""
