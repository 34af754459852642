"""The configuration of a node, and the paths of its sockets and lock."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import common
from lmkv.config.common import PRIVATE_CHANNELS, Gap, unencrypted
from lmkv.config.kinds import (
    ADDRESSES,
    BUFFER_BYTES,
    DISK_FOLDERS,
    FLAG,
    HTTP_URL,
    INSTANCE_ID_IF_ANY,
    NAMES,
    NUMA_NODE,
    OFF,
    OPTIONS,
    PATH,
    PORT,
    PORT_IF_ANY,
    REACHABLE_HOST,
    REMOTE_URL,
    SECONDS,
    SECONDS_OR_ZERO,
    SIZE,
    SIZE_OR_ZERO,
    TEXT,
    TIER_PLUGINS,
    TRANSFER_CHANNEL,
    choice,
    one_port,
)
from lmkv.config.remote_url import parse_remote_url
from lmkv.config.schema import Alias, Config, key
from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder
from lmkv.units import GIB

MAX_SOCKET_PATH_BYTES = 100
"""The limit of unix socket paths is 107 bytes; the rest is reserved for suffixes."""
LOCK_FILE = "lock"
SECRET_FILE = "secret"  # noqa: S105  # a name


def _own_instance_id(suffix: str = "") -> str:
    """The host name with a suffix, as a valid instance id."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip(".")
    return name[: 64 - len(suffix)] + suffix or "node"


def _eviction_policy(raw: object) -> object:
    """Converts LMCache's `cache_policy`. Raises `ValueError` for policies that lmkv does not have."""
    if str(raw).upper() in ("LFU", "FIFO", "MRU"):
        raise ValueError(f"must be LRU or ARC, not {raw!r}: lmkv has no such policy")
    return raw


def attach_socket_beside(engine_socket: Path) -> Path:
    """The socket for `Attach` streams of frames of the node whose `EngineService` is served at `engine_socket`."""
    return engine_socket.with_name("attach.sock")


LOSSY_CODECS = ("fp8", "int8", "int4")
"""Codecs that round elements."""
CODEC = choice("none", *LOSSY_CODECS, "zstd")

_WHERE_TO_STORE = "set local_disk or remote_url to cache there, or local_cpu to true"


@dataclass(frozen=True, kw_only=True)
class NodeConfig(Config):
    """Configuration of `lmkv node`."""

    instance_id: str = key(
        INSTANCE_ID_IF_ANY,
        "",
        "Name of the node in the fleet, unique there.",
        "lmcache_instance_id",
        shown_default="the host's name, and pd_role if that is not both",
    )
    coordinator_address: tuple[str, ...] = key(
        ADDRESSES,
        (),
        "Address of the coordinator, or of several; empty: none, the node serves only its own host.",
        *common.COORDINATOR_ALIASES,
    )
    enable_p2p: bool = key(
        FLAG, True, "Whether nodes fetch chunks from each other; the node joins the fleet in either case."
    )
    p2p_host: str = key(
        REACHABLE_HOST,
        "127.0.0.1",
        "Address of this machine that the node binds and announces to peers.",
        "pd_peer_host",
    )
    p2p_port: int = key(
        PORT,
        0,
        "Port for peers; 0: a free one.",
        Alias(name="p2p_init_ports", convert=one_port),
        Alias(name="pd_peer_init_port", convert=one_port),
    )
    transfer_channel: str = key(
        TRANSFER_CHANNEL,
        "auto",
        "Transfer channel between nodes: auto (shm within a host; between hosts nixl if both have RDMA, else tcp),"
        " shm, nixl, tcp, or a plug-in such as ucx or mooncake.",
    )
    transfer_options: Mapping[str, str] = key(
        OPTIONS,
        dict,
        "Options of a plug-in channel; mooncake has `protocol`: tcp or rdma.",
        shown_default="none",
    )
    transfer_encryption: bool = key(
        FLAG,
        True,
        "Whether tcp between nodes is encrypted by TLS, if tls_cert, tls_key and tls_ca are set.",
    )
    peer_codec: str = key(
        CODEC,
        "none",
        "How chunks are encoded for nodes of other hosts, as `local_disk_codec`, if both nodes set the same.",
    )
    transfer_port: int = key(PORT, 0, "Port that tcp or ucx listens on; 0: a free one.")
    nixl_backends: tuple[str, ...] = key(NAMES, ("UCX",), "NIXL backends, best first.")
    local_cpu: bool = key(
        FLAG,
        True,
        "Whether host memory is a tier of its own. If not, it only has chunks on their way to and from local_disk,"
        " remote_url and tiers, and handoffs.",
    )
    max_local_cpu_size: float = key(SIZE, 5.0, "Host memory for chunks, in GiB by default.")
    max_salt_size: float = key(
        SIZE_OR_ZERO,
        0.0,
        "Host memory for the chunks of one `cache_salt`, in GiB by default; beyond it its own are evicted first; "
        "0: no limit.",
    )
    max_salt_disk_size: float = key(
        SIZE_OR_ZERO,
        0.0,
        "Disk space for the chunks of one `cache_salt`; 0: no limit.",
    )
    max_salt_remote_size: float = key(
        SIZE_OR_ZERO,
        0.0,
        "Bytes of one `cache_salt` that the node has written to the store since its start; 0: no limit.",
    )
    local_disk: tuple[str, ...] = key(
        DISK_FOLDERS, (), "Folder for chunks on disk, or several; the node uses a subfolder of its own in each."
    )
    max_local_disk_size: float = key(
        SIZE_OR_ZERO, 0.0, "Disk space for chunks in all folders of `local_disk`, in GiB by default."
    )
    local_disk_io: str = key(
        choice("plain", "nixl", "gds"),
        "plain",
        "How bytes are copied between disk and pool: plain system calls, NIXL's POSIX plugin, or its GDS plugin.",
    )
    local_disk_codec: str = key(
        CODEC,
        "none",
        "How chunks on disk are encoded: none; zstd, which is lossless; or fp8, int8 or int4, for engines that set"
        " `accept_lossy`.",
    )
    remote_url: str = key(
        REMOTE_URL,
        "",
        "Store for chunks that nodes share: valkey://, redis://, rediss:// or s3://, or a folder that hosts share: file://.",
    )
    remote_endpoint_url: str = key(
        HTTP_URL, "", "Endpoint of the buckets of an `s3://` URL, if not AWS.", shown_default="empty"
    )
    remote_lookup_timeout: float = key(
        SECONDS,
        0.04,
        "Maximum time that a lookup that may save little waits for the store of `remote_url`, in seconds.",
    )
    remote_timeout: float = key(SECONDS, 5.0, "Timeout of the store for one chunk, in seconds.")
    remote_ttl: float = key(
        SECONDS_OR_ZERO,
        0.0,
        "Time after which Valkey or Redis drops a chunk, and nodes an unused one in a folder, in seconds; 0: none.",
    )
    max_remote_size: float = key(
        SIZE_OR_ZERO,
        0.0,
        "Space for the chunks of all nodes in a `file://` folder, in GiB by default; 0: no limit.",
    )
    remote_codec: str = key(
        CODEC,
        "none",
        "How chunks in the store are encoded, as `local_disk_codec`; nodes find only chunks of their own codec there.",
    )
    encryption_key_file: str = key(
        PATH,
        "",
        "File of the keys that encrypt chunks on disk and in the store, the first one for writing.",
        shown_default="empty: they are not encrypted",
    )
    tiers: tuple[Mapping[str, str], ...] = key(
        TIER_PLUGINS,
        (),
        "Tiers of other packages, asked after the others in this order, each with its `name` and its own options.",
    )
    pool_path: str = key(
        PATH,
        "",
        "File on tmpfs or hugetlbfs for the pool; empty: none, or one in /dev/shm with `persist_pool`.",
        shown_default="empty",
    )
    persist_pool: bool = key(
        FLAG,
        False,
        "Whether the pool's file stays after the node exits, even by a crash, for the next node.",
    )
    pool_huge_pages: str = key(
        choice("auto", "always", "never"),
        "auto",
        "Whether anonymous memory uses reserved huge pages; auto: if there are enough.",
    )
    numa_node: str = key(
        NUMA_NODE,
        "auto",
        "Preferred NUMA node of the pool's memory; auto: the node of the GPUs, else of the RDMA cards.",
    )
    eviction_policy: str = key(
        choice("learned", "lru", "arc"),
        "learned",
        "Eviction policy of host memory: learned (from the traffic), lru (least recently used), or arc, which "
        "keeps chunks longer that are used again.",
        Alias(name="cache_policy", convert=_eviction_policy),
    )
    runtime_dir: str = key(
        PATH,
        "",
        "Folder of the node's sockets and lock.",
        shown_default="$XDG_RUNTIME_DIR/lmkv, else /tmp/lmkv-UID",
    )
    node_linger: float = key(
        SECONDS_OR_ZERO,
        900.0,
        "Time that a node keeps running after its last engine has left, in seconds; at most a minute while less "
        "than 512 MiB of memory is available.",
    )
    grant_ttl: float = key(SECONDS, 30.0, "Lifetime of a grant on extents, in seconds.")
    enable_pd: bool = key(
        FLAG,
        True,
        "Whether prompts are handed off from prefill to decode engines if a request asks for it; needs enable_p2p.",
    )
    pd_role: str = key(
        choice("both", "sender", "receiver"),
        "both",
        "Side of handoffs that the node takes: sender (of a prefill), receiver (of a decode), or both.",
    )
    pd_buffer_size: int = key(
        BUFFER_BYTES,
        0,
        "Maximum bytes of the pool for prompts that were handed off to this node and are not loaded; 0: half of it.",
        shown_default="0",
    )
    pd_timeout: float = key(
        SECONDS, 5.0, "Maximum time that the receiver of a handoff waits for a message of its sender, in seconds."
    )
    pd_abandon_timeout: float = key(
        SECONDS, 60.0, "Time that a handed-off prompt is kept for a request that does not arrive, in seconds."
    )
    verify_transfers: bool = key(
        FLAG, True, "Whether the checksum of each chunk from a peer is verified before the chunk is used."
    )
    coordinator_timeout: float = key(
        SECONDS, 0.05, "Maximum time that a lookup that may save little waits for the coordinator, in seconds."
    )
    tls_ca: str = common.tls_ca()
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    tls_client_ca: str = common.tls_client_ca("`tls_ca` for peers, and none for readers of metrics")
    require_encryption: bool = common.require_encryption(
        "what would send or keep chunks unencrypted, or call others without TLS"
    )
    tls_peer_name: str = key(
        TEXT,
        "",
        "Name that peers' certificates must be issued for, if one name is used for all nodes; empty: their address.",
    )
    auth_token: str = common.auth_token()
    auth_token_file: str = common.auth_token_file()
    auth_tokens: str = common.auth_tokens()
    metrics_port: int | None = key(
        PORT_IF_ANY, OFF, "Port on `p2p_host` to serve Prometheus's `/metrics` on; 0: a free one; off: none."
    )
    allowed_hosts: tuple[str, ...] = common.allowed_hosts()
    log_level: str = common.log_level()
    log_format: str = common.log_format()

    def _complete(self) -> None:
        if not self.instance_id:  # prefill and decode on one host are two instances
            suffix = "" if self.pd_role == "both" else f"-{self.pd_role}"
            object.__setattr__(self, "instance_id", _own_instance_id(suffix))
        if not self.stores_chunks and self.enable_pd and self.pd_role == "both":
            notice = f"local_cpu is false: only handoffs are cached; {_WHERE_TO_STORE}"
            object.__setattr__(self, "notices", (*self.notices, notice))

    def contradictions(self) -> Iterator[ConfigError]:
        if self.local_disk and not self.max_local_disk_size:
            yield ConfigError(
                "max_local_disk_size is required with local_disk; set the disk space for chunks",
                key="max_local_disk_size",
            )

        if self.max_salt_size > self.max_local_cpu_size:
            yield ConfigError(
                f"max_salt_size of {self.max_salt_size:g} GiB is more than the pool, max_local_cpu_size of "
                f"{self.max_local_cpu_size:g} GiB; lower it, or remove it",
                key="max_salt_size",
            )

        if self.max_salt_disk_size > self.max_local_disk_size:
            yield ConfigError(
                f"max_salt_disk_size of {self.max_salt_disk_size:g} GiB is more than the disk tier, "
                f"max_local_disk_size of {self.max_local_disk_size:g} GiB; lower it, or remove it",
                key="max_salt_disk_size",
            )

        if self.max_salt_remote_size and not self.remote_url:
            yield ConfigError(
                "max_salt_remote_size is for the store of remote_url, and there is none; set remote_url, or remove it",
                key="max_salt_remote_size",
            )

        if not self.stores_chunks and not self.enable_pd:
            yield ConfigError(f"local_cpu is false, so that nothing is cached; {_WHERE_TO_STORE}", key="local_cpu")

        changes = "encrypt" if self.encryption_key_file else "encode" if self.local_disk_codec != "none" else ""
        if changes and self.local_disk and self.local_disk_io != "plain":
            yield ConfigError(
                f"local_disk_io: {self.local_disk_io} copies chunks as they are; set it to plain to {changes} them",
                key="local_disk_io",
            )

        yield from self._remote_contradictions()

        if self.require_encryption:
            yield from unencrypted(self._unencrypted())

    def _remote_contradictions(self) -> Iterator[ConfigError]:
        """An error for each contradiction among the keys of the store."""
        if folder := self.remote_folder:
            if not (self.max_remote_size or self.remote_ttl):
                yield ConfigError(
                    f"max_remote_size is required with {self.remote_url}, or remote_ttl: a folder evicts nothing; set "
                    "the space for the chunks of all nodes",
                    key="max_remote_size",
                )
            for other in map(Path, self.local_disk):
                if folder == other or folder in other.parents or other in folder.parents:
                    yield ConfigError(
                        f"remote_url: {folder} is not a folder of its own: local_disk has {other}, which one node "
                        "uses; name one that nodes share",
                        key="remote_url",
                    )
        elif self.max_remote_size:
            yield ConfigError(
                "max_remote_size is for a remote_url of file://; other stores evict by their own settings, such as "
                "maxmemory of Valkey, and lifecycle rules of buckets",
                key="max_remote_size",
            )
        if self.remote_ttl and self.remote_url.startswith("s3:"):
            yield ConfigError(
                "remote_ttl is for Valkey and Redis; give the bucket a lifecycle rule that expires objects",
                key="remote_ttl",
            )

    def _unencrypted(self) -> Iterator[Gap]:
        """The keys of this configuration that leave something unencrypted."""
        if self.enable_p2p:
            for name in ("tls_cert", "tls_key", "tls_ca"):
                if not getattr(self, name):
                    yield Gap(name, "nodes call each other without TLS", f"set {name}, or enable_p2p: false")
            if self.transfer_channel not in PRIVATE_CHANNELS:
                yield Gap(
                    "transfer_channel",
                    f"{self.transfer_channel} does not encrypt",
                    "set transfer_channel to tcp or auto",
                )
            if not self.transfer_encryption:
                yield Gap("transfer_encryption", "it is false", "remove it")
        if self.coordinator_address and not self.tls_ca:
            yield Gap("tls_ca", "coordinators are called without TLS", "set tls_ca")
        if self.local_disk and not self.encryption_key_file:
            yield Gap("encryption_key_file", "chunks on disk are not encrypted", "set it, or remove local_disk")
        if self.remote_url and not self.encryption_key_file:
            yield Gap("encryption_key_file", "chunks in the store are not encrypted", "set it, or remove remote_url")
        for tier in self.tiers:
            yield Gap("tiers", f"lmkv cannot know whether {tier['name']} encrypts", "remove it from tiers")

    @property
    def credentials(self) -> Credentials:
        """Credentials for the coordinator. Raises `ConfigError` if a file is invalid."""
        token = BearerToken(text=self.auth_token, file=self.auth_token_file)
        return Credentials(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, token=token)

    @property
    def peer_tls(self) -> Credentials:
        """Credentials for peers, as server and as client; mutual TLS if nodes have certificates."""
        if not (self.tls_cert and self.tls_ca):
            return Credentials(token=self.credentials.token)
        return replace(self.credentials, client_ca=self.tls_client_ca or self.tls_ca, name=self.tls_peer_name)

    @property
    def transfer_tls(self) -> Credentials | None:
        """Credentials of the transfer channel tcp; None if it does not encrypt."""
        tls = self.peer_tls
        return tls if tls.cert and self.transfer_encryption else None

    @property
    def metrics_tls(self) -> Credentials:
        """Credentials of the metrics server."""
        return Credentials(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_client_ca)

    @property
    def stores_chunks(self) -> bool:
        """Whether chunks are cached: in host memory, or through it on disk or in a store."""
        return self.local_cpu or bool(self.local_disk or self.remote_url or self.tiers)

    @property
    def pool_bytes(self) -> int:
        """Size of the pool; if it has only handoffs, of the handoff buffer if that is configured."""
        cache = round(self.max_local_cpu_size * GIB)
        return cache if self.stores_chunks or not self.enable_pd else self.pd_buffer_size or cache

    @property
    def kept_pool_path(self) -> Path:
        """Path of the pool's file with `persist_pool`; contains user and instance."""
        return Path(self.pool_path or f"/dev/shm/lmkv-{os.getuid()}-{self.instance_id}.pool")  # noqa: S108 # checked

    @property
    def pool_file(self) -> Path | None:
        """The pool's file; None if its memory is anonymous."""
        return self.kept_pool_path if self.pool_path or self.persist_pool else None

    @property
    def disk_folders(self) -> list[Path]:
        """This node's subfolder of each folder in `local_disk`, which nodes of a host may share."""
        return [Path(folder, self.instance_id) for folder in self.local_disk]

    @property
    def disk_bytes(self) -> int:
        """Disk space for chunks in all folders."""
        return round(self.max_local_disk_size * GIB)

    @property
    def remote_folder(self) -> Path | None:
        """The folder of `remote_url`; None if that is empty or another store."""
        folder = parse_remote_url(self.remote_url).folder if self.remote_url else ""
        return Path(folder) if folder else None

    @property
    def remote_bytes(self) -> int:
        """Space for chunks in the folder of `remote_url`; 0: no limit."""
        return round(self.max_remote_size * GIB)

    @property
    def pd_buffer_bytes(self) -> int:
        """`pd_buffer_size`, or its default, in bytes."""
        return min(self.pd_buffer_size or self.pool_bytes // 2, self.pool_bytes)

    @property
    def runtime_path(self) -> Path:
        """`runtime_dir`, or its default from the environment. May not exist."""
        if self.runtime_dir:
            return Path(self.runtime_dir).absolute()
        user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
        if user_dir and os.access(user_dir, os.W_OK | os.X_OK):
            return Path(user_dir, "lmkv")
        return Path(f"/tmp/lmkv-{os.getuid()}")  # noqa: S108 # open_instance_folder refuses a foreign one

    @property
    def instance_dir(self) -> Path:
        """This instance's folder under `runtime_path`."""
        return self.runtime_path / self.instance_id

    @property
    def engine_socket(self) -> Path:
        """Unix socket of `EngineService`. Raises `ConfigError` if its path is too long."""
        return self._socket("engine.sock")

    @property
    def attach_socket(self) -> Path:
        """Unix socket of `Attach` streams of frames. Raises `ConfigError` if its path is too long."""
        return attach_socket_beside(self.engine_socket)

    @property
    def pool_socket(self) -> Path:
        """Unix socket that passes the pool to workers. Raises `ConfigError` if its path is too long."""
        return self._socket("pool.sock")

    @property
    def transfer_socket(self) -> Path:
        """Unix socket that passes the pool to peers, read-only. Raises `ConfigError` if its path is too long."""
        return self._socket("peers.sock")

    @property
    def lock_path(self) -> Path:
        """Lock file that a running node of this instance holds."""
        return self.instance_dir / LOCK_FILE

    @property
    def secret_path(self) -> Path:
        """File with the secret by which coordinators recognize this instance after a restart."""
        return self.instance_dir / SECRET_FILE

    def open_instance_folder(self, *, make: bool = True) -> Folder:
        """Opens `instance_dir`, which is this user's alone; creates it and its parents, unless `make` is False.

        Raises `ConfigError` if it cannot be created, if it or `runtime_dir` is a link or belongs to another user, or if
        others may replace it. A configured `runtime_dir` may be accessible to others, the default one may not.
        """
        try:
            with self._open_runtime_folder(make=make) as runtime:
                return runtime.subfolder(self.instance_id, make=make)
        except OSError as error:
            if not make:
                raise
            raise ConfigError(
                f"runtime_dir: cannot create {error.filename}: {error.strerror}; set runtime_dir to a folder that this "
                "user may write to",
                key="runtime_dir",
            ) from None

    def make_instance_dir(self) -> Path:
        """Creates `instance_dir` as `open_instance_folder` does, and returns it."""
        self.open_instance_folder().close()
        return self.instance_dir

    def _open_runtime_folder(self, *, make: bool) -> Folder:
        if self.runtime_dir:
            return Folder.shared(self.runtime_path, "runtime_dir", mode=0o700 if make else None)
        folder = Folder.private(self.runtime_path, "runtime_dir", make=make)
        if os.fstat(folder.fd).st_mode & 0o077:
            folder.close()
            raise ConfigError(
                f"runtime_dir: {self.runtime_path} must be accessible to this user only: run `chmod 700` on it, or set "
                "runtime_dir to another",
                key="runtime_dir",
            )
        return folder

    def _socket(self, name: str) -> Path:
        path = self.instance_dir / name
        if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"runtime_dir makes the socket path {path} {size} bytes long; at most {MAX_SOCKET_PATH_BYTES} work: "
                "set a shorter runtime_dir or instance_id",
                key="runtime_dir",
            )
        return path
