"""Handoffs from prefill to decode: a node announces chunks as they are computed, another one reads them.

Imports `fetch`, `peers`, `sessions` and `cache`. Start with `table.HandoffTable`, then `sender` and `receiver`.
"""
