"""Builds the host tier of a node, with its pool, as configured."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv.pool import memory
from lmkv.pool.file import PoolFile, remove_unused
from lmkv.pool.pool import LEFT_BYTES, Pool
from lmkv.units import GIB, format_bytes
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.eviction import POLICIES
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.warm_start import STAMP, Ledger, WarmStart, ledger_bytes

logger = logging.getLogger(__name__)

MIN_POOL_DIVISOR = 8
"""Minimum fraction of the pool (1/8) that must be populated; below it the node exits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCache:
    """The host tier, the pool that its chunks are in, and the listeners of what all tiers store and remove."""

    pool: Pool
    tier: HostTier
    events: CacheEvents
    warm: WarmStart | None = None
    """Brings back the chunks that an earlier process has left in the pool, if `persist_pool` is on."""


async def open_host_cache(config: NodeConfig, events: CacheEvents, stack: AsyncExitStack) -> HostCache:
    """Opens it until the stack is closed. Raises `ConfigError` if the pool cannot be had."""
    if not config.persist_pool:
        pool = stack.enter_context(_make_pool(config))
        return HostCache(pool=pool, tier=_tier(config, pool, events), events=events)
    file = stack.enter_context(_open_file(config))
    tier, ledger = _tier(config, file.pool, events), Ledger(file.table)
    events.subscribe(ledger)
    warm = await stack.enter_async_context(WarmStart(file, ledger, tier))
    return HostCache(pool=file.pool, tier=tier, events=events, warm=warm)


def _open_file(config: NodeConfig) -> PoolFile:
    """The file that the pool is kept in, with what an earlier life has left there. Raises `ConfigError`."""
    return PoolFile.open(
        config.kept_pool_path,
        config.pool_bytes,
        ledger_bytes(config.pool_bytes),
        stamp=STAMP,
        numa_node=memory.node_for(config.numa_node),
    )


def _make_pool(config: NodeConfig) -> Pool:
    """A pool that ends with the node and its workers. What an earlier life has kept goes. Raises `ConfigError`."""
    if remove_unused(config.kept_pool_path):
        logger.info("removed the pool that was kept at %s: persist_pool is off now", config.kept_pool_path)
    return Pool.create(
        config.pool_bytes,
        Path(config.pool_path) if config.pool_path else None,
        huge_pages=config.pool_huge_pages,
        numa_node=memory.node_for(config.numa_node),
    )


def _tier(config: NodeConfig, pool: Pool, events: CacheEvents) -> HostTier:
    policy = POLICIES[config.eviction_policy]()
    return HostTier(pool.size_bytes, events, policy, quota_bytes=round(config.max_salt_size * GIB))


async def populate(pool: Pool) -> int:
    """Touches the pool's pages ahead of the first stores, in a thread. Returns the bytes that are populated.

    They are fewer than the pool's if memory runs out. Raises `ConfigError` below 1/`MIN_POOL_DIVISOR` of the pool.
    """
    started, size_bytes = time.monotonic(), pool.size_bytes
    try:
        await asyncio.to_thread(pool.populate, 0, size_bytes, leave_bytes=LEFT_BYTES)
    except ConfigError as error:
        size_bytes = int(error.metadata["populated_bytes"])
        if size_bytes < pool.size_bytes // MIN_POOL_DIVISOR:
            raise
        logger.error("%s; continuing with %s", error, format_bytes(size_bytes))
    logger.info(
        "pool of %s is resident after %.1f s%s%s",
        format_bytes(size_bytes),
        time.monotonic() - started,
        f", in huge pages of {format_bytes(pool.huge_page_bytes)}" if pool.huge_page_bytes else "",
        "" if pool.numa_node is None else f", on NUMA node {pool.numa_node}",
    )
    return size_bytes
