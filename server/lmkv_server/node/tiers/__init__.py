"""Secondary tiers: stores below host memory. `disk` and `remote` each implement one.

`reader` loads chunks of any tier into the pool. Imports `cache`. Start with `reader.TierReader`.
"""
