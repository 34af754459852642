"""The keys of one tenant, derived from those of `encryption_key_file`, which may be replaced at any time."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from lmkv.auth.encryption_keys import read_encryption_keys
from lmkv.runtime.reload import Reloadable
from lmkv_server.node.tiers.encryption.cipher import derive
from lmkv_server.node.tiers.encryption.header import KEY_ID_BYTES

KEY_BYTES = 32
_PURPOSE = b"lmkv chunks at rest v1\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantKey:
    """A key of one tenant. `repr` does not show its bytes."""

    name: str
    """Its name in the file, for messages."""
    id: bytes
    """Follows from key and tenant: two files that give two keys one name do not confuse them."""
    secret: bytes = field(repr=False)


class TenantKeys:
    """The keys of one tenant. Raises `ConfigError` if the file is invalid; if it becomes so later, keys stay.

    Thread-safe; each call costs one `stat`.
    """

    def __init__(self, path: str, tenant: str = "") -> None:
        self.scope = hashlib.sha256(_PURPOSE + tenant.encode()).hexdigest()[:16]
        """Separates names of this tenant's objects from those of others in a shared store; independent of keys."""
        self._tenant = tenant
        self._keys = Reloadable([path], lambda: self._read(path))

    @property
    def active(self) -> TenantKey:
        """The key to write with."""
        return next(iter(self._keys.get().values()))

    def find(self, key_id: bytes) -> TenantKey | None:
        """The key to read with; None if it is another tenant's, or no longer in the file."""
        return self._keys.get().get(key_id)

    def _read(self, path: str) -> dict[bytes, TenantKey]:
        keys = {}
        for one in read_encryption_keys(path):
            derived = derive(one.secret, _PURPOSE + self._tenant.encode(), KEY_BYTES + KEY_ID_BYTES)
            secret, key_id = derived[:KEY_BYTES], derived[KEY_BYTES:]
            keys[key_id] = TenantKey(name=one.name, id=key_id, secret=secret)
        return keys
