"""Makes a node's secondary tiers from its configuration. Used by `Node`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv.plugins import TIERS, load_plugin
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.files import NixlFiles
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.base import SecondaryTier
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.build import store_for
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
    name: str = ""
    """The name of a tier of another package, which its `name` must be."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Its options in `tiers`."""


class ConfiguredTier(SecondaryTier, Protocol):
    """A tier that lives as long as the node: entered before the first lookup, exited after the last read."""

    async def __aenter__(self) -> Self:
        """Opens the tier; returns after a bounded time, even if it is not usable then."""

    async def __aexit__(self, *_: object) -> None:
        """Closes the tier within a bounded time."""


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
    for options in config.tiers:
        name = options["name"]
        made: ConfiguredTier = load_plugin(TIERS, name)(replace(context, name=name, options=options))
        if made.name != name:
            raise ConfigError(f"tiers: the plug-in {name!r} has made a tier named {made.name!r}", key="tiers")
        yield made


def _file_io(config: NodeConfig, pool: Pool) -> FileIo:
    """Raises `ConfigError` if NIXL is configured and not installed."""
    if config.local_disk_io == "plain":
        return PlainIo()
    region = Region(address=pool.address, size_bytes=pool.size_bytes)
    return NixlFiles(region, "GDS" if config.local_disk_io == "gds" else "POSIX")
