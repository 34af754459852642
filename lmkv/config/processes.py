"""What each process is told: its keys, their defaults, and what follows from them."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkv.config.kinds import (
    ADDRESS,
    FLAG,
    FOLDERS,
    GIGABYTES,
    HOST,
    INSTANCE_ID,
    MILLISECONDS,
    NAMES,
    OFF,
    PATH,
    PORT,
    PORT_IF_ANY,
    PORTS,
    REACHABLE_HOST,
    SECONDS,
    SECONDS_OR_ZERO,
    SECRET,
    SOCKET_PATH,
    TEXT,
    choice,
    one_port,
    whole,
)
from lmkv.config.schema import Alias, Config, key, keys
from lmkv.errors import ConfigError
from lmkv.tls import Tls
from lmkv.units import GB

MAX_SOCKET_PATH_BYTES = 100
"""Unix socket paths end at 107 bytes; the rest is left to those who need a suffix."""

TRANSFER_CHANNEL = choice("nixl")
LOG_LEVEL = choice("debug", "info", "warning", "error")
LOG_FORMAT = choice("text", "json")
_COORDINATOR_ALIASES = ("coordinator", "controller_pull_url", "controller_url")


def _tls_ca() -> Any:
    return key(PATH, "", "PEM file of the issuers that the coordinator's certificate must come from; turns on TLS.")


def _tls_cert() -> Any:
    return key(PATH, "", "PEM file of this process's certificate.")


def _tls_key() -> Any:
    return key(PATH, "", "PEM file of the private key of `tls_cert`.")


def _own_instance_id() -> str:
    """This machine's name, as far as an instance id may hold it."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".")[:64] or "node"


def _refuse_foreign(folder: Path) -> None:
    """Raises `ConfigError` unless only this user may enter: in /tmp anyone may have made it first."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"runtime_dir: {folder} is not this user's alone (mode 700); set runtime_dir to another folder",
            key="runtime_dir",
        )


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Config):
    """What a node is told: `lmkv node`."""

    instance_id: str = key(
        INSTANCE_ID,
        _own_instance_id,
        "Name of the node in the fleet, unique there.",
        "lmcache_instance_id",
        shown_default="the host's name",
    )
    coordinator_address: str = key(
        ADDRESS, "", "Where the coordinator is; empty: none, the node serves only its own host.", *_COORDINATOR_ALIASES
    )
    enable_p2p: bool = key(FLAG, True, "Whether nodes fetch chunks from each other.")
    p2p_host: str = key(
        REACHABLE_HOST, "127.0.0.1", "Address of this machine that the node binds, and tells its peers."
    )
    p2p_port: int = key(
        PORT,
        0,
        "Port for peers; 0: a free one.",
        Alias(name="p2p_init_ports", convert=one_port),
    )
    transfer_channel: str = key(TRANSFER_CHANNEL, "nixl", "What moves bytes between nodes.")
    nixl_backends: tuple[str, ...] = key(NAMES, ("UCX",), "NIXL backends, best first.")
    local_cpu: bool = key(FLAG, True, "Whether chunks are kept in host memory.")
    max_local_cpu_size: float = key(GIGABYTES, 5.0, "Host memory for chunks, in GB unless it says its unit.")
    pool_path: str = key(
        PATH, "", "File on tmpfs or hugetlbfs that holds the pool; empty: anonymous memory.", shown_default="empty"
    )
    runtime_dir: str = key(
        PATH,
        "",
        "Folder of the node's sockets and lock.",
        shown_default="$XDG_RUNTIME_DIR/lmkv, else /tmp/lmkv-UID",
    )
    node_linger: float = key(SECONDS_OR_ZERO, 60.0, "How long a node outlives its last engine, in seconds.")
    grant_ttl: float = key(SECONDS, 30.0, "How long a grant on extents lasts, in seconds.")
    fetch_timeout: float = key(SECONDS, 1.0, "Most time to fetch chunks from a peer, in seconds.")
    coordinator_timeout: float = key(SECONDS, 0.05, "Most time to wait for the coordinator in a lookup, in seconds.")
    tls_ca: str = _tls_ca()
    tls_cert: str = _tls_cert()
    tls_key: str = _tls_key()
    metrics_port: int | None = key(
        PORT_IF_ANY, OFF, "Port on `p2p_host` to serve Prometheus's `/metrics` on; 0: a free one; off: none."
    )
    log_level: str = key(LOG_LEVEL, "info", "Least severe messages to log.")
    log_format: str = key(LOG_FORMAT, "text", "How to log: lines to read, or one JSON object a line.")

    @property
    def tls(self) -> Tls:
        """How to speak to the coordinator. Raises `ConfigError` if a file is not what it should be."""
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    @property
    def max_local_cpu_bytes(self) -> int:
        """`max_local_cpu_size` in bytes."""
        return round(self.max_local_cpu_size * GB)

    @property
    def runtime_path(self) -> Path:
        """`runtime_dir`, or its default. Depends on the environment; may not exist yet."""
        if self.runtime_dir:
            return Path(self.runtime_dir).absolute()
        user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
        if user_dir and os.access(user_dir, os.W_OK | os.X_OK):
            return Path(user_dir, "lmkv")
        return Path(f"/tmp/lmkv-{os.getuid()}")  # noqa: S108 # make_instance_dir refuses a foreign one

    @property
    def instance_dir(self) -> Path:
        """This instance's folder under `runtime_path`."""
        return self.runtime_path / self.instance_id

    @property
    def engine_socket(self) -> Path:
        """Unix socket of `EngineService`. Raises `ConfigError` if its path is too long."""
        return self._socket("engine.sock")

    @property
    def pool_socket(self) -> Path:
        """Unix socket that hands out the pool's memory. Raises `ConfigError` if its path is too long."""
        return self._socket("pool.sock")

    @property
    def lock_path(self) -> Path:
        """File whose lock says that a node of this instance is alive."""
        return self.instance_dir / "lock"

    def make_instance_dir(self) -> Path:
        """Makes `instance_dir` and what leads to it, for this user only, and returns it.

        Raises `ConfigError` if it cannot be made, or if the default folder is open to others. A `runtime_dir` that was
        named may be open: it may be shared on purpose.
        """
        try:
            self.runtime_path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.runtime_dir:
                _refuse_foreign(self.runtime_path)
            self.instance_dir.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"runtime_dir: cannot make {error.filename}: {error.strerror}; set runtime_dir to a folder that this "
                "user may write",
                key="runtime_dir",
            ) from None
        return self.instance_dir

    def _socket(self, name: str) -> Path:
        path = self.instance_dir / name
        if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"runtime_dir makes the socket path {path} {size} bytes long; at most {MAX_SOCKET_PATH_BYTES} work: "
                "set a shorter runtime_dir or instance_id",
                key="runtime_dir",
            )
        return path


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig(NodeConfig):
    """What the connector in an engine is told, the keys of the node it starts included."""

    chunk_size: int = key(whole(1, 1 << 20, "a number of tokens above 0"), 256, "Tokens in a chunk.")
    save_partial_chunks: bool = key(
        FLAG,
        True,
        "Whether the last chunk of a prompt is stored though it is not full.",
        "save_unfull_chunk",
        Alias(name="discard_partial_chunks", convert=lambda raw: not FLAG.read(raw)),
    )
    save_decode_cache: bool = key(FLAG, True, "Whether chunks that generated tokens fill are stored.")
    min_retrieve_tokens: int = key(
        whole(0, 1 << 20, "a number of tokens"),
        8,
        "Fewest tokens worth loading: fewer are computed, which is as quick.",
    )
    min_fetch_tokens: int = key(
        whole(0, 1 << 20, "a number of tokens"),
        16,
        "Fewest tokens worth fetching from a peer, beyond those that are here.",
    )
    enable_async_loading: bool = key(FLAG, True, "Whether other requests run while one loads.")
    lookup_timeout: float = key(
        SECONDS,
        0.1,
        "Most time a request waits for a lookup, in seconds.",
        Alias(name="lookup_timeout_ms", convert=lambda raw: MILLISECONDS.read(raw) / 1000),
    )
    load_timeout: float = key(SECONDS, 1.0, "Most time a request waits for a load, in seconds; then it computes.")
    node_address: str = key(
        SOCKET_PATH,
        "",
        "Socket of a node that engines share; empty: the connector starts its own.",
        shown_default="empty",
    )
    node_start_timeout: float = key(SECONDS, 20.0, "Most time the connector's own node may take to start, in seconds.")
    cluster_secret: str = key(
        SECRET, "", "Secret that chunk keys are made with, the same in the whole fleet; no flag takes it."
    )
    model_id: str = key(
        TEXT, "", "Identity of the weights, where the model's files do not tell it.", shown_default="from the model"
    )
    copy_threads: int = key(
        whole(0, 1024, "a number of threads from 0 to 1024 (0: lmkv decides)"),
        0,
        "Threads that copy between the engine's memory and the pool; 0: lmkv decides.",
    )
    verify_loads: bool = key(FLAG, False, "Whether each chunk's checksum is compared again when it is loaded.")

    def node_config(self) -> NodeConfig:
        """The configuration of the node that the connector starts."""
        return NodeConfig(**{name: getattr(self, name) for name in keys(NodeConfig)})


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig(Config):
    """What a coordinator is told: `lmkv coordinator`."""

    host: str = key(HOST, "127.0.0.1", "Address to bind; 0.0.0.0 for all.")
    port: int = key(PORT, 9000, "Port to serve gRPC on, or HTTP if `monitor_ports` serve gRPC; 0: a free one.")
    http_port: int | None = key(
        PORT_IF_ANY,
        None,
        "Port to serve HTTP on; 0: a free one; off: none.",
        shown_default="`port` + 1, or `port` itself if `monitor_ports` serve gRPC",
    )
    monitor_ports: Mapping[str, int] = key(
        PORTS,
        dict,
        "Ports to serve gRPC on, by any name, as LMCache has them: `port` is then left to HTTP, unless `http_port` is "
        "set.",
        Alias(name="monitor_port", convert=lambda raw: {"pull": PORT.read(raw)}),
    )
    lease_ttl: float = key(SECONDS, 3.0, "How long a node counts as alive after its last report, in seconds.")
    operation_ttl: float = key(SECONDS, 3600.0, "How long operations that ended can be asked about, in seconds.")
    cluster_secret: str = key(
        SECRET, "", "Secret that chunk keys are made with, the same in the whole fleet; no flag takes it."
    )
    tokenizers: Mapping[str, str] = key(
        FOLDERS,
        dict,
        "Folders of the models whose text `/tokenize` and the page take, by the names they are served as.",
    )
    tls_cert: str = _tls_cert()
    tls_key: str = _tls_key()
    tls_client_ca: str = key(
        PATH, "", "PEM file of the issuers that clients' certificates must come from; empty: clients need none."
    )
    log_level: str = key(LOG_LEVEL, "info", "Least severe messages to log.")
    log_format: str = key(LOG_FORMAT, "text", "How to log: lines to read, or one JSON object a line.")

    @property
    def tls(self) -> Tls:
        """How to serve. Raises `ConfigError` if a file is not what it should be."""
        return Tls(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def grpc_ports(self) -> Mapping[str, int]:
        """The ports that speak gRPC, by the key that sets each."""
        ports = {f"monitor_ports[{name!r}]": port for name, port in self.monitor_ports.items()}
        return ports if self.port_is_for_http else {"port": self.port, **ports}

    @property
    def http_ports(self) -> Mapping[str, int]:
        """The port that speaks HTTP, by the key that sets it; empty if there is none."""
        if self.port_is_for_http:
            return {"port": self.port}
        if self.http_port is None:
            # Next to `port`; where no port is next to it, as next to 0, a free one.
            return {"http_port": self.port and (self.port + 1) % 65536}
        return {} if self.http_port == OFF else {"http_port": self.http_port}

    @property
    def port_is_for_http(self) -> bool:
        """Whether the ports mean what they mean to LMCache: monitors for its instances, `port` for HTTP."""
        return bool(self.monitor_ports) and self.http_port is None


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Config):
    """What commands that ask the coordinator are told: `lmkv lookup`, `lmkv instances`."""

    coordinator_address: str = key(ADDRESS, "127.0.0.1:9000", "Where the coordinator is.", *_COORDINATOR_ALIASES)
    tls_ca: str = _tls_ca()
    tls_cert: str = _tls_cert()
    tls_key: str = _tls_key()

    @property
    def tls(self) -> Tls:
        """How to speak to the coordinator. Raises `ConfigError` if a file is not what it should be."""
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
