"""Operations on the fleet: moves, copies, clears and pins, the orders that they send to nodes, and the audit log.

May import `registry` and what is below. Start with `operations.Operations`.
"""
