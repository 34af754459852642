"""The node's side of the control plane: registration, leases, reports and lookups at each coordinator.

May import `commands` and what is below it. Start with `membership.FleetMembership`, which keeps one
`session.CoordinatorSession` per coordinator.
"""
