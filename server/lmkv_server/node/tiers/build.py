"""Makes a node's secondary tiers from its configuration. Used by `Node`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, Self

from lmkv.auth.authenticator import Authenticator
from lmkv.config import NodeConfig
from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError
from lmkv.plugins import TIERS, load_plugin
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.channel import NixlFiles
from lmkv.units import GIB
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.tiers.backend import BackendTimes
from lmkv_server.node.tiers.base import SecondaryTier
from lmkv_server.node.tiers.codec import KnownSpecs, chunk_codec
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.folder import FolderStore
from lmkv_server.node.tiers.remote.store import RemoteStore
from lmkv_server.node.tiers.remote.sweeper import FolderLimits
from lmkv_server.node.tiers.remote.tier import STORE_TIMES, RemoteTier

if TYPE_CHECKING:
    from lmkv_server.node.tiers.encryption import ChunkEncryption, TenantKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class TierContext:
    """The collaborators of which a tier is made."""

    config: NodeConfig
    cache: HostCache
    """Host memory: chunks are read into it, and written from it. A tier that writes subscribes to its events."""
    specs: KnownSpecs
    """The specs of the node's engines, which say how chunks are encoded."""
    name: str = ""
    """The name of a tier of another package, which its `name` must be."""
    options: Mapping[str, str] = field(default_factory=dict)
    keys: TenantKeys | None = None
    """The keys that tiers encrypt with, if `encryption_key_file` is set."""

    def encryption(self, tier: str) -> ChunkEncryption | None:
        if self.keys is None:
            return None
        from lmkv_server.node.tiers.encryption import ChunkEncryption

        return ChunkEncryption(self.keys, tier)


class ConfiguredTier(SecondaryTier, Protocol):
    """A tier that lives as long as the node: entered before the first lookup, exited after the last read."""

    async def __aenter__(self) -> Self:
        """Opens the tier; returns after a bounded time, even if it is not usable then."""

    async def __aexit__(self, *_: object) -> None:
        """Closes the tier within a bounded time."""


def make_tiers(context: TierContext) -> Iterator[ConfiguredTier]:
    """The tiers that are configured, the fastest first, each to be entered. Raises `ConfigError`."""
    config, cache = context.config, context.cache
    context = replace(context, keys=_tenant_keys(config))
    if config.local_disk:
        yield DiskTier(
            config.disk_folders,
            config.disk_bytes,
            cache,
            io=_file_io(config, cache.pool),
            encryption=context.encryption("disk"),
            codec=chunk_codec("local_disk_codec", config.local_disk_codec, context.specs),
            quota_bytes=round(config.max_salt_disk_size * GIB),
        )
    if config.remote_url:
        yield RemoteTier(
            store_for(config),
            cache,
            lookup_seconds=config.remote_lookup_timeout,
            times=BackendTimes(stall_seconds=config.remote_timeout) if config.remote_folder else STORE_TIMES,
            encryption=context.encryption("remote"),
            codec=chunk_codec("remote_codec", config.remote_codec, context.specs),
            quota_bytes=round(config.max_salt_remote_size * GIB),
        )
    for options in config.tiers:
        name = options["name"]
        made: ConfiguredTier = load_plugin(TIERS, name)(replace(context, name=name, options=options))
        if made.name != name:
            raise ConfigError(f"tiers: the plug-in {name!r} has made a tier named {made.name!r}", key="tiers")
        yield made


def _tenant_keys(config: NodeConfig) -> TenantKeys | None:
    """Raises `ConfigError` if the file of keys is invalid, or if they need what is not installed."""
    if not config.encryption_key_file:
        return None
    if find_spec("cryptography") is None:
        raise ConfigError(
            "encryption_key_file: needs cryptography, which is not installed; "
            "pip install '.[encryption]' in a clone of lmkv",
            key="encryption_key_file",
        )
    from lmkv_server.node.tiers.encryption import TenantKeys

    own = Authenticator(config.auth_tokens, config.credentials.token)
    return TenantKeys(config.encryption_key_file, own.own_tenant)


def _file_io(config: NodeConfig, pool: Pool) -> FileIo:
    """Raises `ConfigError` if NIXL is configured and not installed."""
    if config.local_disk_io == "plain":
        return PlainIo()
    region = Region(address=pool.address, size_bytes=pool.size_bytes)
    return NixlFiles(region, "GDS" if config.local_disk_io == "gds" else "POSIX")


def store_for(config: NodeConfig) -> RemoteStore:
    """The store of `remote_url`; nothing is connected yet. Raises `ConfigError` if it needs what is not installed."""
    url = parse_remote_url(config.remote_url)
    if url.folder:
        limits = FolderLimits(size_bytes=config.remote_bytes, unused_seconds=config.remote_ttl)
        return FolderStore(url, timeout_seconds=config.remote_timeout, limits=limits)
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        raise ConfigError(
            f"remote_url: {url.shown} needs {package}, which is not installed; "
            f"pip install '.[{extra}]' in a clone of lmkv",
            key="remote_url",
        )
    if url.bucket:
        from lmkv_server.node.tiers.remote.s3 import S3Store

        return S3Store(url, endpoint_url=config.remote_endpoint_url, timeout_seconds=config.remote_timeout)
    from lmkv_server.node.tiers.remote.valkey import ValkeyStore

    return ValkeyStore(url, timeout_seconds=config.remote_timeout, ttl_seconds=config.remote_ttl)
