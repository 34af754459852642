"""Makes a node's secondary tiers from its configuration. Used by `Node`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmkv.config import NodeConfig
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.files import NixlFiles
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.store import store_for
from lmkv_server.node.tiers.remote.tier import RemoteTier


@dataclass(frozen=True, kw_only=True, slots=True)
class TierContext:
    """What a tier is made of."""

    config: NodeConfig
    tier: HostTier
    """Host memory: chunks are read into it, and written from it."""
    pool: Pool
    """The memory that `tier` manages."""
    events: CacheEvents
    """A tier that writes subscribes here to what host memory stores."""


ConfiguredTier = DiskTier | RemoteTier


def make_tiers(context: TierContext) -> Iterator[ConfiguredTier]:
    """The tiers that are configured, the fastest first, each to be entered. Raises `ConfigError`."""
    config, tier, pool, events = context.config, context.tier, context.pool, context.events
    if config.local_disk:
        yield DiskTier(
            config.disk_folders, config.disk_bytes, tier=tier, pool=pool, events=events, io=_file_io(config, pool)
        )
    if config.remote_url:
        yield RemoteTier(
            store_for(config), tier=tier, pool=pool, events=events, lookup_seconds=config.remote_lookup_timeout
        )


def _file_io(config: NodeConfig, pool: Pool) -> FileIo:
    """Raises `ConfigError` if NIXL is configured and not installed."""
    if config.local_disk_io == "plain":
        return PlainIo()
    region = Region(address=pool.address, size_bytes=pool.size_bytes)
    return NixlFiles(region, "GDS" if config.local_disk_io == "gds" else "POSIX")
