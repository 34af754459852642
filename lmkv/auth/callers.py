"""The callers that a server admits, read from the tokens file:

    tokens:
      - {name: nodes-a, role: engine, tenant: team-a, sha256: 5e88…}     # of the token
      - {name: grafana, role: reader, file: /run/secrets/grafana, max_requests_per_second: 50}
    tenants:
      team-a: {max_instances: 16, max_chunks: 10000000}

The file contains digests, not tokens: it gives no access to who reads it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from lmkv.auth.caller import Caller, Role
from lmkv.auth.token import read_secret
from lmkv.errors import ConfigError

KEY = "auth_tokens"
"""The configuration key that names the file."""
NAME_PATTERN = "^[A-Za-z0-9._-]{1,64}$"

_Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
_Limit = Annotated[int, msgspec.Meta(ge=1)]


class TenantQuota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant at a coordinator. 0: only the limits of the process apply."""

    max_instances: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_chunks: Annotated[int, msgspec.Meta(ge=0)] = 0


NO_QUOTA = TenantQuota()


class Callers:
    """All callers, by their tokens."""

    def __init__(self, callers: Sequence[Caller] = (), quotas: Mapping[str, TenantQuota] | None = None) -> None:
        self.quotas = dict(quotas or {})
        """By tenant."""
        # Looked up by a keyed digest, so that the duration of a lookup reveals nothing about a token.
        self._pepper = secrets.token_bytes(32)
        self._callers = {self._lookup_key(caller.digest): caller for caller in callers}

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants that a caller or a quota names."""
        return frozenset(caller.tenant for caller in self._callers.values()) | self.quotas.keys()

    def find(self, token: str) -> Caller | None:
        """The caller with this token, or None."""
        digest = hashlib.sha256(token.encode()).digest()
        caller = self._callers.get(self._lookup_key(digest))
        return caller if caller is not None and hmac.compare_digest(caller.digest, digest) else None

    def _lookup_key(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


class _TokenEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    role: Role
    tenant: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{0,64}$")] = ""
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] = ""
    file: str = ""
    max_requests_per_second: _Limit | None = None
    max_concurrent_requests: _Limit | None = None


class _TokensFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[_TokenEntry]
    tenants: dict[_Name, TenantQuota] = {}


def read_callers(path: str) -> tuple[Callers, list[str]]:
    """The callers in a tokens file, and all files that it depends on. Raises `ConfigError`, which quotes no token."""
    import yaml  # slow to import, and most processes have no such file

    try:
        content = yaml.safe_load(Path(path).read_bytes())
        file = msgspec.convert(content, _TokensFile)
    except OSError as error:
        raise ConfigError(f"{KEY}: cannot read {path}: {error.strerror}", key=KEY) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{KEY}: {path} is not valid YAML{f', line {mark.line + 1}' if mark else ''}", key=KEY
        ) from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{KEY}: {path}: {error}", key=KEY) from None
    callers = [_caller(path, entry) for entry in file.tokens]
    if len({caller.digest for caller in callers}) < len(callers):
        raise ConfigError(f"{KEY}: {path} gives one token to two callers; give each its own", key=KEY)
    return Callers(callers, file.tenants), [path, *(entry.file for entry in file.tokens if entry.file)]


def _caller(path: str, entry: _TokenEntry) -> Caller:
    if bool(entry.sha256) == bool(entry.file):
        raise ConfigError(
            f"{KEY}: {path}: {entry.name} needs either sha256 (of its token, in hexadecimal) or file", key=KEY
        )
    if entry.file:
        digest = hashlib.sha256(read_secret(entry.file, f"{KEY}: {entry.name}: file").encode()).digest()
    else:
        digest = bytes.fromhex(entry.sha256)
    return Caller(
        name=entry.name,
        role=entry.role,
        tenant=entry.tenant,
        max_requests_per_second=entry.max_requests_per_second or 0,
        max_concurrent_requests=entry.max_concurrent_requests or 0,
        digest=digest,
    )
