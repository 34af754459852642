"""The disk tier: chunk files in one or several folders, with an index and an eviction queue of their own.

Start with `tier.DiskTier`.
"""
