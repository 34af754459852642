"""The connector's scheduler side: lookups, load and store plans, write credits. Never blocks.

Start with `side.SchedulerSide`.
"""
