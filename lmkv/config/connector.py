"""The configurations of the connector in an engine, of commands that call a coordinator, and of the webhook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import common
from lmkv.config.common import Gap
from lmkv.config.kinds import (
    ADDRESSES,
    FLAG,
    HOST,
    MILLISECONDS,
    PATH,
    PORT,
    SECONDS,
    SHARE,
    SOCKET_PATH,
    TEXT,
    choice,
    whole,
)
from lmkv.config.node import LOSSY_CODECS, NodeConfig
from lmkv.config.schema import Alias, Config, key, keys
from lmkv.errors import ConfigError
from lmkv.runtime.patience import MOST_SECONDS


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig(NodeConfig):
    """Configuration of the connector, including the keys of the node that it starts."""

    chunk_size: int = key(whole(1, 1 << 20, "a number of tokens above 0"), 256, "Tokens in a chunk.")
    kv_format: str = key(
        choice("auto", "native", "token_major"),
        "auto",
        "Format of chunks: token_major works with engines of any block size, native is faster on CPUs; auto: "
        "native on CPUs without share_across_engines, else token_major.",
    )
    share_across_engines: bool = key(
        FLAG,
        False,
        "Whether engines of other kinds that set it too may load this engine's KV, and it theirs.",
    )
    hash_scheme: str = key(
        choice("sha256-16", "sha256-pages"),
        "sha256-16",
        "How chunks are named: sha256-pages as SGLang names its pages, to share with it; partial chunks are then "
        "not stored.",
    )
    save_partial_chunks: bool = key(
        FLAG,
        True,
        "Whether the last chunk of a prompt, and of an answer, is stored if it is not full.",
        "save_unfull_chunk",
        Alias(name="discard_partial_chunks", convert=lambda raw: not FLAG.read(raw)),
    )
    save_decode_cache: bool = key(FLAG, True, "Whether generated tokens are stored, like the prompt's.")
    min_retrieve_tokens: int = key(
        whole(0, 1 << 20, "a number of tokens"),
        8,
        "Minimum number of tokens to load; fewer are computed.",
    )
    min_fetch_tokens: int = key(
        whole(0, 1 << 20, "a number of tokens"),
        16,
        "Minimum number of tokens to fetch from a peer, beyond those on this node.",
    )
    refuse_slow_fetches: bool = key(
        FLAG, True, "Whether tokens are computed if loading them is expected to take longer."
    )
    enable_async_loading: bool = key(FLAG, True, "Whether other requests run while one loads.")
    accept_hints: bool = key(
        FLAG, True, "Whether requests may carry hints; otherwise each is rejected, and the request is served."
    )
    lookup_timeout: float = key(
        SECONDS,
        0.1,
        "Maximum time that a request waits for a lookup that may save little, in seconds.",
        Alias(name="lookup_timeout_ms", convert=lambda raw: MILLISECONDS.read(raw) / 1000),
    )
    max_lookup_timeout: float = key(
        SECONDS,
        MOST_SECONDS,
        "Maximum time of a lookup that may save more: half of the estimated prefill, in seconds.",
    )
    load_timeout: float = key(SECONDS, 1.0, "Maximum time that a request waits for a load, in seconds.")
    pd_load_timeout: float = key(
        SECONDS,
        30.0,
        "Maximum time that a request waits for a prompt that is handed off to it, in seconds.",
    )
    pd_buffer_device: str = key(
        choice("cpu", "cuda"),
        "cpu",
        "Where prompts that are handed off to this engine wait for their load: cpu, in the pool; cuda, on its GPUs.",
    )
    node_address: str = key(
        SOCKET_PATH,
        "",
        "Socket of a node that engines share; empty: the connector starts its own.",
        shown_default="empty",
    )
    node_start_timeout: float = key(
        SECONDS, 20.0, "Maximum time for the start of the connector's own node, in seconds."
    )
    cluster_secret: str = common.cluster_secret()
    model_id: str = key(
        TEXT, "", "Identity of the weights, if the model's files do not identify them.", shown_default="from the model"
    )
    weight_version: str = key(
        TEXT,
        "",
        "Version of the weights at start, if they are replaced under one name.",
        shown_default="none",
    )
    accept_lossy: bool = key(
        FLAG,
        False,
        "Whether this engine may load chunks that a codec of disk, store or peers has rounded; it then shares chunks "
        "only with engines that set it too.",
    )
    copy_threads: int = key(
        whole(0, 1024, "a number of threads from 0 to 1024 (0: lmkv decides)"),
        0,
        "Threads that copy between the engine's memory and the pool; 0: automatic.",
    )
    verify_loads: bool = key(FLAG, False, "Whether the checksum of each chunk is verified again when it is loaded.")
    audit_rate: float = key(
        SHARE,
        0.001,
        "Share of hits of which a chunk is computed again and compared; 0: none, 1: every hit.",
    )

    def contradictions(self) -> Iterator[ConfigError]:
        yield from super().contradictions()
        for name in ("local_disk_codec", "remote_codec") if not (self.accept_lossy or self.node_address) else ():
            if (codec := getattr(self, name)) in LOSSY_CODECS:
                yield ConfigError(
                    f"{name}: {codec} rounds chunks, and this engine accepts exact ones only; set accept_lossy to "
                    f"true, or {name} to none or zstd",
                    key=name,
                )

    def _unencrypted(self) -> Iterator[Gap]:
        if self.pd_buffer_device == "cuda":
            yield Gap("pd_buffer_device", "workers read into it by nixl, which does not encrypt", "set it to cpu")
        if not self.node_address:  # otherwise the node has a configuration of its own
            yield from super()._unencrypted()

    @property
    def stores_partial_chunks(self) -> bool:
        """Whether chunks that are not full are stored and found: only under the scheme that has keys for them."""
        return self.save_partial_chunks and self.hash_scheme == "sha256-16"

    def node_config(self) -> NodeConfig:
        """The configuration of the node that the connector starts."""
        return NodeConfig(**{name: getattr(self, name) for name in keys(NodeConfig)})


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Config):
    """Configuration of commands that call the coordinator, such as `lmkv lookup`."""

    coordinator_address: tuple[str, ...] = key(
        ADDRESSES, ("127.0.0.1:9000",), "Address of the coordinator, or of several.", *common.COORDINATOR_ALIASES
    )
    tls_ca: str = common.tls_ca()
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    auth_token: str = common.auth_token()
    auth_token_file: str = common.auth_token_file()

    @property
    def credentials(self) -> Credentials:
        """Credentials for the coordinator. Raises `ConfigError` if a file is invalid."""
        token = BearerToken(text=self.auth_token, file=self.auth_token_file)
        return Credentials(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, token=token)


@dataclass(frozen=True, kw_only=True)
class WebhookConfig(Config):
    """Configuration of `lmkv webhook`."""

    host: str = key(HOST, "127.0.0.1", "Address to bind; 0.0.0.0 for all.")
    port: int = key(PORT, 9443, "HTTPS port that Kubernetes calls; 0: a free one.")
    pod_additions: str = key(
        PATH, "", "YAML file of what is added to pods of engines, which the chart renders; required."
    )
    tls_cert: str = common.tls_cert()
    tls_key: str = common.tls_key()
    log_level: str = common.log_level()
    log_format: str = common.log_format()

    def missing(self) -> Iterator[ConfigError]:
        if not self.pod_additions:
            yield ConfigError("pod_additions is missing: name the file that the chart renders", key="pod_additions")
        if not self.tls_cert:
            yield ConfigError("tls_cert is missing: Kubernetes calls webhooks over HTTPS only", key="tls_cert")

    @property
    def credentials(self) -> Credentials:
        """Credentials of the server. Raises `ConfigError` if a file is invalid."""
        return Credentials(cert=self.tls_cert, key=self.tls_key)
