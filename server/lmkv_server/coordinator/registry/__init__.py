"""The state of one tenant's fleet: registered instances and their chunks, updated by streams of reports.

May import `layout_store` and `core`. Start with `registry.Registry`.
"""
