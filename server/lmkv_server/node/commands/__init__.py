"""Orders of the coordinator (fetch, drop, pin, unpin): their execution, progress, journal, and what they brought.

May import `handoff` and what is below it. Start with `runner.OrderRunner`.
"""
