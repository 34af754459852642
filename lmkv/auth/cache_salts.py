"""Cache salts that follow from who sends a request: an HMAC that clients cannot compute.

    key  = HMAC-SHA-256(cluster secret, "lmkv cache salt v1")
    salt = HMAC-SHA-256(key, policy ‖ tenant ‖ user ‖ the salt that the client sent), each preceded by its length

The tenant is always a field of its own: whatever a client sends, its salts differ from those of all other tenants. All
processes with one cluster secret derive the same salts.
"""

from __future__ import annotations

import hmac

from lmkv.packing import pack_fields

NONE, TENANT, USER = "none", "tenant", "user"
POLICIES = (NONE, TENANT, USER)
"""Values of `cache_salt_policy`."""


class CacheSalts:
    """Derives salts by a policy other than `none`."""

    def __init__(self, policy: str, secret: str) -> None:
        assert policy in (TENANT, USER), policy
        assert secret, "checked by the configuration"
        self._policy = policy
        self._key = hmac.digest(secret.encode(), b"lmkv cache salt v1", "sha256")

    @property
    def separates_users(self) -> bool:
        """Whether users of one tenant get different salts."""
        return self._policy == USER

    def derive(self, tenant: str, user: str = "", wish: str = "") -> str:
        """The salt of a request, 64 hexadecimal digits. `wish` is the salt that the client sent; empty if none."""
        names = (self._policy, tenant, user if self.separates_users else "", wish)
        return hmac.digest(
            self._key, pack_fields(name.encode("utf-8", "surrogatepass") for name in names), "sha256"
        ).hex()
