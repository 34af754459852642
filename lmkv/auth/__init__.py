"""Who may call what: what clients show, whom servers know, and the table of roles.

    BearerToken ──── Authorization: Bearer ────► Gate ──► Callers (the tokens file: name, role, tenant, limits)
                                             └────► ROLES   (RPC → roles)

Without a tokens file a gate is open to whoever reaches the port.
"""
