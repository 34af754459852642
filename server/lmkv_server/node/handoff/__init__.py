"""Handoffs from prefill to decode: a node announces chunks as they are computed, another node reads them.

Imports `fetch`, `peers`, `sessions` and `cache`. Start with `table.HandoffTable`, then `receiver` and `sender`.
"""
