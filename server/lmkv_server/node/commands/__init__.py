"""Orders of the coordinator (fetch, drop, pin, unpin): their execution, progress and journal.

Imports `fetch`, `tiers`, `sessions` and `cache`. Start with `orders.Orders`.
"""
