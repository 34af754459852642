"""Operations on the fleet: moves, copies, clears, drains and pins, their orders to nodes, and the audit log.

May import `registry` and what is below. Start with `operations.Operations`.
"""
