"""Orders of the coordinator (fetch, drop, pin, unpin): their execution, progress, journal, and records of operations.

May import `handoff` and what is below it. Start with `runner.OrderRunner`.
"""
