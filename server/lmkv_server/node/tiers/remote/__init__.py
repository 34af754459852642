"""The remote tier: a store that all nodes share (Valkey or Redis, or S3).

`store` is the contract of a store, `valkey` and `s3` implement it. Start with `tier.RemoteTier`.
"""
