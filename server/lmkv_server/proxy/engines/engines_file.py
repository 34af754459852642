"""How operators name engines: by a URL and a role, in a file of them or one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from lmkv.config.router import engine_url
from lmkv.config.sources import read_file
from lmkv.errors import BadRequest, ConfigError
from lmkv.runtime.reload import Reloadable

NAME_SCHEME = "dns"
"""`dns://` and `dns+https://` URLs stand for all addresses of their host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEndpoint:
    """Where engines are: one at a URL, or one at each address of the host of a `dns://` URL."""

    url: str
    role: str

    @property
    def is_name(self) -> bool:
        """Whether each address of its host is an engine."""
        return self.url.startswith(NAME_SCHEME)

    @property
    def target(self) -> str:
        """The URL of its engines, with the name as host."""
        scheme, separator, rest = self.url.partition("://")
        own = scheme.removeprefix(NAME_SCHEME).removeprefix("+") if self.is_name else scheme
        return f"{own or 'http'}{separator}{rest}"


def name_of(url: str, role: str) -> EngineEndpoint:
    """The engines at all addresses of a URL's host."""
    scheme, separator, rest = url.partition("://")
    named = {"http": NAME_SCHEME, "https": f"{NAME_SCHEME}+https"}.get(scheme, scheme)
    return EngineEndpoint(url=f"{named}{separator}{rest}", role=role)


def read_endpoint(raw: object, roles: Collection[str]) -> EngineEndpoint:
    """An endpoint of an operator: a URL, or an object with `url` and `role`. `roles` are those that the proxy knows.

    The role may be missing if there is only one. Raises `BadRequest`.
    """
    given = {"url": raw} if isinstance(raw, str) else raw
    if not isinstance(given, dict) or not given.keys() <= {"url", "role"}:
        raise BadRequest("an engine must be a URL, or an object of url and role")
    url, role = given.get("url"), given.get("role") or (next(iter(roles)) if len(roles) == 1 else None)
    parsed = read_url(url)
    if role not in roles:
        known = " or ".join(sorted(roles))
        raise BadRequest(f"the role of {parsed} must be {known}, not {role!r}; mode of the proxy decides which exist")
    assert isinstance(role, str)
    return EngineEndpoint(url=parsed, role=role)


def read_url(raw: object) -> str:
    """The URL of an endpoint. Raises `BadRequest`."""
    try:
        return engine_url(raw)
    except (TypeError, ValueError):
        raise BadRequest(f"url must be http://HOST:PORT, https:// or dns://, not {raw!r}") from None


class EnginesFile:
    """The endpoints that a YAML file lists under `engines`. Raises `ConfigError` if it is invalid at first."""

    def __init__(self, path: str, roles: Collection[str], count_failure: Callable[[], None]) -> None:
        """`count_failure` is called for each change that is not applied."""
        self.path = path
        self.count_failure = count_failure
        self._roles = roles
        self._is_read = False
        self._value = Reloadable([path], self._read)
        self._is_read = True

    def get(self) -> tuple[EngineEndpoint, ...]:
        """The endpoints of the current file, or of the last valid one."""
        return self._value.get()

    def _read(self) -> tuple[EngineEndpoint, ...]:
        try:
            return read_engines(Path(self.path), self._roles)
        except ConfigError:
            if self._is_read:
                self.count_failure()
            raise


def read_engines(path: Path, roles: Collection[str]) -> tuple[EngineEndpoint, ...]:
    """Reads the file. Raises `ConfigError` that names the entry."""
    entries = read_file(path, "engines_file")
    unknown = [entry.spelling for entry in entries if entry.spelling != "engines"]
    raw = next((entry.raw for entry in entries if entry.spelling == "engines"), None)
    if unknown or not isinstance(raw, list):
        problem = f"has the key {unknown[0]}" if unknown else "has no list engines"
        raise ConfigError(f"{path} {problem}; it must hold `engines:` and a list of URLs", key="engines_file")
    found: dict[str, EngineEndpoint] = {}
    for number, item in enumerate(raw, 1):
        try:
            endpoint = read_endpoint(item, roles)
            if endpoint.url in found:
                raise BadRequest(f"{endpoint.url} is listed twice")
        except BadRequest as error:
            raise ConfigError(f"engine {number} of {path}: {error}", key="engines_file") from None
        found[endpoint.url] = endpoint
    return tuple(found.values())
