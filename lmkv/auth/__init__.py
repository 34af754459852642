"""Authentication and authorization: bearer tokens, TLS certificates, roles and rate limits.

    BearerToken ── Authorization: Bearer ──► Authenticator ──► Callers (the tokens file: name, role, tenant, limits)
                                                           └─► ROLES   (RPC → roles)

Without a tokens file an authenticator admits every caller. Imports `lmkv.errors`, `lmkv.runtime` and `lmkv.telemetry`.
Start with `authenticator.Authenticator`.
"""
