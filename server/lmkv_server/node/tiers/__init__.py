"""Secondary tiers: places below host memory that chunks are loaded from. `disk` and `remote` keep them in backends.

`backend_tier` and `reader` serve all backends. Imports `cache`. Start with `base.SecondaryTier`.
"""
