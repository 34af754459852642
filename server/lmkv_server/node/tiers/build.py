"""Builds the secondary tiers of a node, as configured."""

from __future__ import annotations

from contextlib import AsyncExitStack

from lmkv.config import NodeConfig
from lmkv.pool.pool import Pool
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl.files import NixlFiles
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.disk.folder import FileIo, PlainIo
from lmkv_server.node.tiers.disk.tier import DiskTier
from lmkv_server.node.tiers.remote.backend import store_for
from lmkv_server.node.tiers.remote.tier import RemoteTier


async def open_disk(
    config: NodeConfig, tier: HostTier, pool: Pool, events: CacheEvents, stack: AsyncExitStack
) -> DiskTier | None:
    """The disk tier, until the stack is closed; None without `local_disk`. Raises `ConfigError`."""
    if not config.local_disk:
        return None
    disk = DiskTier(
        config.disk_folders, config.disk_bytes, tier=tier, pool=pool, events=events, io=_file_io(config, pool)
    )
    return await stack.enter_async_context(disk)


def _file_io(config: NodeConfig, pool: Pool) -> FileIo:
    """Raises `ConfigError` if NIXL is configured and not installed."""
    if config.local_disk_io == "plain":
        return PlainIo()
    region = Region(address=pool.address, size_bytes=pool.size_bytes)
    return NixlFiles(region, "GDS" if config.local_disk_io == "gds" else "POSIX")


async def open_remote(
    config: NodeConfig, tier: HostTier, pool: Pool, events: CacheEvents, stack: AsyncExitStack
) -> RemoteTier | None:
    """The remote tier, until the stack is closed; None without `remote_url`. Raises `ConfigError`."""
    if not config.remote_url:
        return None
    remote = RemoteTier(
        store_for(config), tier=tier, pool=pool, events=events, lookup_seconds=config.remote_lookup_timeout
    )
    return await stack.enter_async_context(remote)
