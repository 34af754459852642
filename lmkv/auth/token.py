"""The bearer token of a client, and its HTTP and gRPC header."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv.runtime.reload import Reloadable

HEADER = "authorization"


@dataclass(frozen=True, kw_only=True)
class BearerToken:
    """A token as text, or in a file that may be replaced. `repr` shows neither.

    Raises `ConfigError` if both are given, the file cannot be read, or the token is not valid in a header.
    """

    text: str = field(default="", repr=False)
    file: str = ""

    def __post_init__(self) -> None:
        if self.text and self.file:
            raise ConfigError("auth_token and auth_token_file are both set; keep one", key="auth_token_file")
        reloadable = Reloadable(
            [self.file], lambda: _checked(read_secret(self.file, "auth_token_file"), "auth_token_file")
        )
        object.__setattr__(self, "_reloadable", reloadable if self.file else None)
        _checked(self.text, "auth_token")

    def __bool__(self) -> bool:
        return bool(self.text or self.file)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The header to send with a call; empty if there is no token."""
        reloadable: Reloadable[str] | None = self._reloadable  # type: ignore[attr-defined]
        text = reloadable.get() if reloadable else self.text
        return ((HEADER, f"Bearer {text}"),) if text else ()


def read_secret(path: str, key: str) -> str:
    """The secret in a file, without surrounding whitespace. Raises `ConfigError` if it is empty or cannot be read."""
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key}: cannot read {path}: {why}", key=key) from None
    if not text:
        raise ConfigError(f"{key}: {path} is empty", key=key)
    return text


def token_in(authorization: str) -> str:
    """The token in an `Authorization` header: what follows `Bearer`, or the password of `Basic`; empty if none.

    `Basic` is for browsers: they prompt for the password, and send it with every request of a page.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not text
        return ""


def _checked(text: str, key: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{key} must be printable ASCII without spaces, because it is sent in a header", key=key)
    return text


NO_TOKEN = BearerToken()
