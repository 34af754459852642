"""The node's side of the control plane: registration, leases, reports and lookups at each coordinator.

Start with `fleet.Fleet`.
"""
