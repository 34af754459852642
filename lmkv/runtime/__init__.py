"""Run-time services of every process: stop signals, timers, listening unix sockets, and files that are reloaded
when they change.

Imports only `lmkv.errors`. Start with `signals`.
"""
