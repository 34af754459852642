"""Run-time services of every process: stop signals, timers, folders, listening unix sockets, the memory and places that
callers share, and files that are reloaded when they change.

Imports only `lmkv.errors`. Start with `signals`.
"""
