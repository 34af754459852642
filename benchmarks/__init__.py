"""What lmkv costs and what it saves, measured on this machine (docs/performance/benchmarks.md).

`python -m benchmarks.NAME` runs one, `python -m benchmarks --quick` runs all, `python -m benchmarks.tables` renders
their results.
"""
