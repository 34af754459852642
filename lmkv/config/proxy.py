"""The configuration of a proxy, and the engines that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lmkv.auth.handoff import HandoffKeys
from lmkv.auth.token import BearerToken
from lmkv.config import common
from lmkv.config.kinds import (
    HOST,
    PATH,
    PORT,
    SECONDS,
    SECONDS_OR_ZERO,
    Kind,
    choice,
    one_or_several,
    whole,
)
from lmkv.config.router import POLICY, URLS, RouterConfig, items
from lmkv.config.schema import key
from lmkv.errors import ConfigError


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
        "YAML file that lists the engines, and is read again after a change; in place of engines, prefiller_* and "
        "decoder_*.",
    )
    policy: str = key(
        POLICY,
        "least_loaded",
        "How the engine of a request is selected: round_robin, least_loaded, or kv_aware (the engine that holds "
        "most of the prompt).",
    )
    request_timeout: float = key(
        SECONDS, 600.0, "Maximum time for one request, including its whole answer, in seconds."
    )
    max_concurrent_requests: int = key(
        whole(1, 1 << 20, "a number of requests above 0"),
        1024,
        "Maximum number of concurrent requests; further ones are answered 503.",
    )
    allowed_hosts: tuple[str, ...] = common.allowed_hosts("the proxy")
    max_connections_per_client: int = common.max_connections_per_client(1024)
    stop_timeout: float = key(
        SECONDS_OR_ZERO, 5.0, "Time that requests in flight have to finish when the proxy is stopped, in seconds."
    )
    stats_interval: float = key(
        SECONDS, 5.0, "Time between two tables of latencies in the log while there is traffic, in seconds."
    )
    engine_tls_ca: str = key(
        PATH,
        "",
        "PEM file of the CAs of engines' certificates; if set, prefill and decode engines are called over HTTPS.",
        shown_default="empty: those that the system trusts",
    )
    auth_tokens: str = common.auth_tokens(
        "see the proxy's page and metrics and, with a cache_salt_policy, send requests"
    )

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
