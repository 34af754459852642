"""What every lmkv process needs at run time: stop signals, timers, and files that are reloaded when they change.

Imports only `lmkv.errors`. Start with `signals`.
"""
