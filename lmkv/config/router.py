"""The configuration of proxies and endpoint pickers: keys that both share, as both select engines, and their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.auth.handoff import HandoffKeys
from lmkv.config import common
from lmkv.config.kinds import (
    ADDRESS,
    ADDRESSES,
    FLAG,
    HOST,
    MILLISECONDS,
    OFF,
    PATH,
    PORT,
    PORT_IF_ANY,
    SECONDS,
    SECONDS_OR_ZERO,
    SECRET,
    SIZE,
    Kind,
    choice,
    one_or_several,
    whole,
)
from lmkv.config.schema import Alias, Config, key
from lmkv.errors import ConfigError
from lmkv.units import GIB

_HEADER = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"


def items(raw: object) -> list[Any]:
    """Items of a list, of JSON, of comma-separated text, or of a repeated flag."""
    if isinstance(raw, str):
        try:
            content = json.loads(raw)
        except ValueError:  # IPv6 addresses have brackets too
            content = None
        return content if isinstance(content, list) else [item.strip() for item in raw.split(",")]
    if isinstance(raw, list | tuple):
        return [item for each in raw for item in (items(each) if isinstance(each, str) else [each])]
    return [raw]


def _urls(raw: object) -> tuple[str, ...]:
    return tuple(engine_url(item) for item in items(raw) if item != "")


def engine_url(raw: object) -> str:
    """The URL of an engine, or of a name whose addresses are engines (`dns://`). Raises `TypeError` or `ValueError`."""
    if not isinstance(raw, str):
        raise TypeError
    address = re.fullmatch(r"(https?://|dns(?:\+https)?://|)([^/]+)/*", raw)
    if address is None or not ADDRESS.parse(address[2]):
        raise ValueError
    return f"{address[1] or 'http://'}{address[2]}"


def _header(raw: object) -> str:
    if not isinstance(raw, str) or not re.fullmatch(_HEADER, raw):
        raise ValueError
    return raw.lower()


URLS = Kind(
    metavar="URL",
    expects="engines such as http://10.0.0.7:8000",
    parse=_urls,
    schema=one_or_several(r"(https?://)?[^\s/:,@\[\]]+:[1-9][0-9]{0,3}"),
    write=",".join,
    repeatable=True,
)
HEADER_NAME = Kind(
    metavar="NAME",
    expects="the name of a header",
    parse=_header,
    schema={"type": "string", "pattern": f"^{_HEADER}$"},
)
HEADER_NAME_IF_ANY = Kind(
    metavar="NAME",
    expects="the name of a header, or nothing",
    parse=lambda raw: raw if raw == "" else _header(raw),
    schema={"type": "string", "pattern": f"^({_HEADER})?$"},
)
_POLICY = choice("round_robin", "least_loaded", "kv_aware")
POLICY = Kind(
    metavar=_POLICY.metavar,
    expects=_POLICY.expects,
    parse=lambda raw: _POLICY.parse(raw.replace("-", "_") if isinstance(raw, str) else raw),
    schema=_POLICY.schema,
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Config):
    """Base of the configurations of proxy and picker."""

    host: str = key(HOST, "127.0.0.1", "Address to bind; 0.0.0.0 for all.")
    coordinator_address: tuple[str, ...] = key(
        ADDRESSES,
        (),
        "Address of the coordinator, or of several, for kv_aware; empty: none.",
        *common.COORDINATOR_ALIASES,
    )
    lookup_timeout: float = key(
        SECONDS,
        0.1,
        "Maximum time that a request waits for a lookup, in seconds.",
        Alias(name="lookup_timeout_ms", convert=lambda raw: MILLISECONDS.read(raw) / 1000),
    )
    session_header: str = key(
        HEADER_NAME,
        "x-session-id",
        "Header whose requests with the same value go to the same engine; else OpenAI's `user`.",
    )
    session_ttl: float = key(
        SECONDS_OR_ZERO, 600.0, "Time that a session stays with its engine without a request, in seconds; 0: none."
    )
    replicate: bool = key(
        FLAG,
        True,
        "Whether kv_aware has idle engines copy prompts for which requests wait at other engines; with tokens at the "
        "coordinator it needs one of the role operator.",
    )
    health_interval: float = key(SECONDS, 1.0, "Time between two health checks of an engine, in seconds.")
    health_timeout: float = key(
        SECONDS, 2.0, "Timeout of a health check; an engine is unhealthy after three of them, in seconds."
    )
    max_body_size: float = key(SIZE, 32 / 1024, "Maximum size of a request, in GiB by default.")
    engine_api_key: str = key(SECRET, "", "API key for lmkv's own requests to engines; no flag takes it.")
    tls_ca: str = common.tls_ca()
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    tls_client_ca: str = common.tls_client_ca("clients need none")
    engine_tls_ca: str = key(
        PATH,
        "",
        "PEM file of the CAs of engines' certificates, which must be issued for their addresses.",
        shown_default="empty: those that the system trusts",
    )
    cluster_secret: str = common.cluster_secret()
    auth_token: str = common.auth_token()
    auth_token_file: str = common.auth_token_file()
    cache_salt_policy: str = common.cache_salt_policy()
    user_header: str = common.user_header(HEADER_NAME_IF_ANY)
    log_level: str = common.log_level()
    log_format: str = common.log_format()

    @property
    def credentials(self) -> Credentials:
        """Credentials for the coordinator. Raises `ConfigError` if a file is invalid."""
        token = BearerToken(text=self.auth_token, file=self.auth_token_file)
        return Credentials(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, token=token)

    @property
    def client_tls(self) -> Credentials:
        """Credentials of the servers."""
        return Credentials(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def engine_tls(self) -> Credentials:
        """Credentials for engines with https URLs."""
        return Credentials(ca=self.engine_tls_ca, cert=self.tls_cert, key=self.tls_key)

    @property
    def max_body_bytes(self) -> int:
        """`max_body_size` in bytes."""
        return round(self.max_body_size * GIB)


@dataclass(frozen=True, kw_only=True)
class PickerConfig(RouterConfig):
    """Configuration of `lmkv picker`."""

    port: int = key(PORT, 9002, "Port of gRPC, which the gateway calls; 0: a free one.")
    metrics_port: int | None = key(
        PORT_IF_ANY, OFF, "Port to serve `/metrics`, `/healthz` and `/readyz` on; 0: a free one; off: none."
    )
    engines: tuple[str, ...] = key(
        URLS,
        (),
        "Engines; each address of a host name is one, as of a headless Service. The flag may be repeated.",
        "engine",
    )
    policy: str = key(
        POLICY,
        "kv_aware",
        "How the engine of a request is picked: round_robin, least_loaded, or kv_aware (least expected "
        "time to the first token).",
    )
    request_timeout: float = key(SECONDS, 600.0, "Maximum time of one stream of the gateway, in seconds.")
    max_concurrent_requests: int = key(
        whole(1, 1 << 20, "a number of requests above 0"),
        4096,
        "Maximum number of streams of the gateway; further requests are answered 429.",
    )
    max_body_size: float = key(
        SIZE,
        32 / 1024,
        "Maximum size of a body that is read for the prompt; a larger one is routed by load. In GiB by default.",
    )
    allowed_hosts: tuple[str, ...] = common.allowed_hosts()
    stop_timeout: float = key(
        SECONDS_OR_ZERO, 5.0, "Time that streams in flight have to finish when the picker is stopped, in seconds."
    )
    auth_tokens: str = common.auth_tokens()

    def missing(self) -> Iterator[ConfigError]:
        if not self.engines:
            yield ConfigError("there is no engine; set engines to http://HOST:PORT", key="engines")
        if self.policy == "kv_aware" and not self.coordinator_address:
            yield ConfigError(
                "policy is kv_aware, which needs a coordinator; set coordinator_address, or policy to least_loaded",
                key="coordinator_address",
            )
        yield from common.missing_for_salts(self.cache_salt_policy, self.auth_tokens, self.cluster_secret)


def _hosts(raw: object) -> tuple[str, ...]:
    return tuple(HOST.parse(item) for item in items(raw))


def _ports(raw: object) -> tuple[int, ...]:
    ports = tuple(PORT.parse(item) for item in items(raw) if item != "")
    if 0 in ports:
        raise ValueError
    return ports


_HOST = r"[^\s\x00/\[\]@:,]+"
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
HOSTS = Kind(
    metavar="HOSTS",
    expects="host names or addresses, without ports",
    parse=_hosts,
    schema={**one_or_several(_HOST), "pattern": f"^{_HOST}$"},
    write=",".join,
)
PORTS = Kind(
    metavar="PORTS",
    expects="ports from 1 to 65535",
    parse=_ports,
    schema={"type": ["array", "integer"], "items": _PORT, "minimum": 1, "maximum": 65535},
    write=lambda ports: ",".join(map(str, ports)),
)
ENGINE_COUNT = whole(0, 1024, "a number of engines from 0 to 1024 (0: as many as hosts or ports are named)")


@dataclass(frozen=True, kw_only=True)
class ProxyConfig(RouterConfig):
    """Configuration of `lmkv proxy`."""

    replaced_flags: ClassVar[Sequence[str]] = ("proxy_host", "proxy_port", "decoder_init_port", "decoder_alloc_port")

    port: int = key(PORT, 9100, "Port of the OpenAI API; 0: a free one.")
    mode: str = key(
        choice("pd", "route"),
        "pd",
        "Kind of engines behind the proxy: pd (prefill engines and decode engines), or route (engines that do both).",
    )
    prefiller_host: tuple[str, ...] = key(HOSTS, ("127.0.0.1",), "Hosts of the prefill engines.")
    prefiller_port: tuple[int, ...] = key(
        PORTS, (7100,), "Ports of the prefill engines; one for several on one host: the first of consecutive ports."
    )
    num_prefillers: int = key(
        ENGINE_COUNT, 0, "Number of prefill engines.", shown_default="as many as hosts or ports are named"
    )
    decoder_host: tuple[str, ...] = key(HOSTS, ("127.0.0.1",), "Hosts of the decode engines.")
    decoder_port: tuple[int, ...] = key(
        PORTS, (7200,), "Ports of the decode engines; one for several on one host: the first of consecutive ports."
    )
    num_decoders: int = key(
        ENGINE_COUNT, 0, "Number of decode engines.", shown_default="as many as hosts or ports are named"
    )
    engines: tuple[str, ...] = key(URLS, (), "Engines in mode route; the flag may be repeated.", "engine")
    engines_file: str = key(
        PATH,
        "",
        "YAML file that lists the engines, and is read again after a change; in place of the other keys for engines.",
    )
    policy: str = key(
        POLICY,
        "least_loaded",
        "How the engine of a request is selected: round_robin, least_loaded, or kv_aware (least expected "
        "time to the first token).",
    )
    request_timeout: float = key(
        SECONDS, 600.0, "Maximum time for one request, including its whole answer, in seconds."
    )
    max_concurrent_requests: int = key(
        whole(1, 1 << 20, "a number of requests above 0"),
        1024,
        "Maximum number of concurrent requests; further ones are answered 503.",
    )
    allowed_hosts: tuple[str, ...] = common.allowed_hosts()
    max_connections_per_client: int = common.max_connections_per_client(1024)
    stop_timeout: float = key(
        SECONDS_OR_ZERO, 5.0, "Time that requests in flight have to finish when the proxy is stopped, in seconds."
    )
    stats_interval: float = key(
        SECONDS, 5.0, "Time between two lines with latencies in the log while there is traffic, in seconds."
    )
    engine_tls_ca: str = key(
        PATH,
        "",
        "PEM file of the CAs of engines' certificates; if set, prefill and decode engines are called over HTTPS.",
        shown_default="empty: those that the system trusts",
    )
    auth_tokens: str = common.auth_tokens()

    def contradictions(self) -> Iterator[ConfigError]:
        if self.engines_file and self.engines:
            yield ConfigError("engines and engines_file are both set; set one of them", key="engines_file")
        if self.mode == "route" and not (self.engines or self.engines_file):
            reason = "mode is route, but there is no engine; set engines to http://HOST:PORT, or engines_file"
            yield ConfigError(reason, key="engines")
        if self.mode == "pd" and self.engines:
            yield ConfigError(
                "engine is for mode route, but mode is pd; set mode to route, or set prefill and decode engines by "
                "prefiller_port and decoder_port",
                key="engines",
            )
        if self.policy == "kv_aware" and not self.coordinator_address:
            yield ConfigError(
                "policy is kv_aware, which needs a coordinator; set coordinator_address",
                key="coordinator_address",
            )
        yield from common.missing_for_salts(self.cache_salt_policy, self.auth_tokens, self.cluster_secret)
        for role in ("prefillers", "decoders") if self.mode == "pd" and not self.engines_file else ():
            try:
                getattr(self, role)
            except ConfigError as error:
                yield error

    @property
    def handoff_keys(self) -> HandoffKeys:
        """Keys of the proofs of handoffs."""
        return HandoffKeys(self.cluster_secret, BearerToken(text=self.auth_token, file=self.auth_token_file))

    @property
    def prefillers(self) -> tuple[str, ...]:
        """`host:port` of each prefill engine. Raises `ConfigError` if hosts and ports do not match."""
        return _addresses("prefiller", self.prefiller_host, self.prefiller_port, self.num_prefillers)

    @property
    def decoders(self) -> tuple[str, ...]:
        """`host:port` of each decode engine. Raises `ConfigError` if hosts and ports do not match."""
        return _addresses("decoder", self.decoder_host, self.decoder_port, self.num_decoders)


def _addresses(role: str, hosts: Sequence[str], ports: Sequence[int], count: int) -> tuple[str, ...]:
    """`host:port` of `count` engines: one host or one per engine, one port or one per engine.

    One host and one port mean consecutive ports.
    """
    count = count or max(len(hosts), len(ports))
    for name, given in (("host", hosts), ("port", ports)):
        if len(given) not in (1, count):
            raise ConfigError(
                f"{role}_{name} has {len(given)} values, but there are {count} {role}s; set one, or {count}",
                key=f"{role}_{name}",
            )
    if len(hosts) == 1 and len(ports) == 1:
        ports = range(ports[0], ports[0] + count)
        if ports[-1] > 65535:
            raise ConfigError(f"{role}_port {ports[0]} is too high for {count} consecutive ports", key=f"{role}_port")
    spread = list(ports) * (1 if len(ports) == count else count)
    named = list(hosts) * (1 if len(hosts) == count else count)
    return tuple(f"{host}:{number}" for host, number in zip(named, spread, strict=True))
