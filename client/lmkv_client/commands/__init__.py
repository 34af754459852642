"""The commands of the coordinator's and the proxy's clients. Start with `flags.py`, which lists them.

Exit codes: 0 done, 1 rejected or failed, 2 bad usage or configuration, 3 partly done, 130 interrupted.
"""
