"""The configuration of a coordinator, and the protocols of its ports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lmkv.auth.credentials import Credentials
from lmkv.config import common
from lmkv.config.common import Gap, unencrypted
from lmkv.config.kinds import FOLDERS, HOST, OFF, PATH, PORT, PORT_IF_ANY, PORTS, SECONDS, VALKEY_URL
from lmkv.config.remote_url import has_tls
from lmkv.config.schema import Alias, Config, key
from lmkv.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(Config):
    """Configuration of `lmkv coordinator`."""

    host: str = key(HOST, "127.0.0.1", "Address to bind; 0.0.0.0 for all.")
    port: int = key(PORT, 9000, "Port for gRPC, or for HTTP if `monitor_ports` serve gRPC; 0: a free one.")
    http_port: int | None = key(
        PORT_IF_ANY,
        None,
        "Port for HTTP; 0: a free one; off: none.",
        shown_default="`port` + 1, or `port` itself if `monitor_ports` serve gRPC",
    )
    monitor_ports: Mapping[str, int] = key(
        PORTS,
        dict,
        "Ports for gRPC, by any name, as in LMCache: `port` then serves HTTP, unless `http_port` is set.",
        Alias(name="monitor_port", convert=lambda raw: {"pull": PORT.read(raw)}),
    )
    lease_ttl: float = key(SECONDS, 3.0, "Time that a node is considered alive after its last report, in seconds.")
    operation_ttl: float = key(SECONDS, 3600.0, "Time that finished operations can be queried, in seconds.")
    layout_map_url: str = key(
        VALKEY_URL,
        "",
        "Valkey or Redis, one server or a cluster, through which coordinators share one layout map: valkey://, "
        "redis://, or rediss:// with TLS.",
        shown_default="empty: each keeps its own",
    )
    cluster_secret: str = common.cluster_secret()
    tokenizers: Mapping[str, str] = key(
        FOLDERS,
        dict,
        "Folders of the models whose text `/tokenize` and the page accept, by the names they are served as.",
    )
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    tls_client_ca: str = common.tls_client_ca("clients need none")
    require_encryption: bool = common.require_encryption("a port or a `layout_map_url` without TLS")
    auth_tokens: str = common.auth_tokens()
    allowed_hosts: tuple[str, ...] = common.allowed_hosts()
    max_connections_per_client: int = common.max_connections_per_client(500)
    audit_log: str = key(
        PATH,
        "",
        "File to which each move, copy, clear, pin and unpin is logged, one line of JSON each.",
        shown_default="empty: the process's own log",
    )
    log_level: str = common.log_level()
    log_format: str = common.log_format()

    def contradictions(self) -> Iterator[ConfigError]:
        if self.require_encryption:
            yield from unencrypted(self._unencrypted())

    def _unencrypted(self) -> Iterator[Gap]:
        """The keys of this configuration that leave something unencrypted."""
        for name in ("tls_cert", "tls_key"):
            if not getattr(self, name):
                yield Gap(name, "the coordinator's ports have no TLS", f"set {name}")
        if self.layout_map_url and not has_tls(self.layout_map_url):
            yield Gap("layout_map_url", "it names a server without TLS", "begin it with rediss:// or valkeys://")

    @property
    def credentials(self) -> Credentials:
        """Credentials of the server. Raises `ConfigError` if a file is invalid."""
        return Credentials(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def grpc_ports(self) -> Mapping[str, int]:
        """gRPC ports by the key that sets each."""
        ports = {f"monitor_ports[{name!r}]": port for name, port in self.monitor_ports.items()}
        return ports if self.port_is_for_http else {"port": self.port, **ports}

    @property
    def http_ports(self) -> Mapping[str, int]:
        """The HTTP port by the key that sets it; empty if there is none."""
        if self.port_is_for_http:
            return {"port": self.port}
        if self.http_port is None:
            # `port` + 1, or a free one if `port` is 0 or the last one.
            return {"http_port": self.port and (self.port + 1) % 65536}
        return {} if self.http_port == OFF else {"http_port": self.http_port}

    @property
    def port_is_for_http(self) -> bool:
        """Whether the ports have the meaning of LMCache: `monitor_ports` for gRPC, `port` for HTTP."""
        return bool(self.monitor_ports) and self.http_port is None
