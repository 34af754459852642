"""Long-running operations (move, copy, clear) and pins: what coordinators ask of nodes, and its progress.

Start with `operations.Operations`.
"""
