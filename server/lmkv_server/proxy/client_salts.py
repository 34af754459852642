"""Identifies the client of a request and derives its cache salt: `cache_salt_policy` of the proxy and the picker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lmkv.auth.authenticator import TENANT_HEADER, Authenticator
from lmkv.auth.cache_salts import NONE, CacheSalts
from lmkv.auth.caller import CLIENT_RPC
from lmkv.auth.credentials import HEADER
from lmkv.errors import PermissionDenied, TooManyRequests, Unauthenticated
from lmkv_server.proxy.openai import MESSAGES, Json

_SALT = "cache_salt"


class NotAdmitted(Exception):
    """The client is unknown, exceeds its limits, or its request cannot get a salt."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """The client of one request."""

    name: str = ""
    """The name of its token; empty if it is not known."""
    tenant: str = ""
    user: str | None = None
    """The user that the user header names; None if requests name users."""
    salts: CacheSalts | None = None
    """None if the policy is `none`."""
    engine_api_key: str = field(default="", repr=False)

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that engines receive: the API key of the configuration replaces a token of the proxy."""
        if self.salts is None:
            return dict(headers)
        rest = {name: value for name, value in headers.items() if name.lower() != HEADER}
        return rest | ({HEADER: f"Bearer {self.engine_api_key}"} if self.engine_api_key else {})

    def salted(self, path: str, body: Json) -> Json:
        """The request with the client's derived salt instead of the salt that it sent. Raises `NotAdmitted`."""
        if self.salts is None:
            return body
        wish = _text(body.get(_SALT), _SALT)
        if wish == "" and body.get(_SALT) is not None:
            raise NotAdmitted(400, "cache_salt must be a non-empty string if it is sent")
        user = ""
        if self.salts.separates_users:
            user = _user(path, body) if self.user is None else self.user
        return {**body, _SALT: self.salts.derive(self.tenant, user, wish)}


_UNSALTED = Client()


class ClientSalts:
    """Authenticates clients, and salts what they send. With the policy `none`, requests pass as they are."""

    def __init__(
        self, policy: str, secret: str, user_header: str, authenticator: Authenticator, engine_api_key: str
    ) -> None:
        self._salts = CacheSalts(policy, secret) if policy != NONE else None
        self._user_header = user_header
        self._authenticator = authenticator
        self._engine_api_key = engine_api_key

    @property
    def are_derived(self) -> bool:
        """Whether bodies get salts that depend on the client, which is known once it is admitted."""
        return self._salts is not None

    @contextmanager
    def client(self, headers: Mapping[str, str]) -> Iterator[Client]:
        """The scope of one request. Raises `NotAdmitted` if no client with its token is known, or has the role.

        `headers` has names in lower case, or is case-insensitive.
        """
        if self._salts is None:
            yield _UNSALTED
            return
        shown = [(name, headers[name]) for name in (HEADER, TENANT_HEADER) if name in headers]
        with ExitStack() as call:
            try:
                caller = call.enter_context(self._authenticator.authorized_call(CLIENT_RPC, shown))
            except Unauthenticated:
                message = "send a token that auth_tokens lists for a client, as the header Authorization: Bearer TOKEN"
                raise NotAdmitted(401, message, {"www-authenticate": "Bearer"}) from None
            except PermissionDenied as error:
                raise NotAdmitted(403, str(error)) from None
            except TooManyRequests as error:
                raise NotAdmitted(429, str(error), {"retry-after": "1"}) from None
            yield Client(
                name=caller.name,
                tenant=caller.tenant,
                user=headers.get(self._user_header, "") if self._user_header else None,
                salts=self._salts,
                engine_api_key=self._engine_api_key,
            )


def _user(path: str, body: Mapping[str, Any]) -> str:
    """The user that a request names: OpenAI's `user`, or Anthropic's `metadata.user_id`."""
    if path != MESSAGES:
        return _text(body.get("user"), "user")
    metadata = body.get("metadata")
    return _text(metadata.get("user_id"), "metadata.user_id") if isinstance(metadata, dict) else ""


def _text(value: object, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NotAdmitted(400, f"{name} must be a string")
    return value
