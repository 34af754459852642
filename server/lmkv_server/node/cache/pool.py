"""The pool of a node, as its configuration wants it: one that ends with the node, or one that outlives it."""

from __future__ import annotations

import logging
from pathlib import Path

from lmkv.config import NodeConfig
from lmkv.pool import numa
from lmkv.pool.file import PoolFile, remove_unused
from lmkv.pool.pool import Pool
from lmkv_server.node.cache.ledger import STAMP, ledger_bytes

logger = logging.getLogger(__name__)


def open_file(config: NodeConfig) -> PoolFile:
    """The file that the pool is kept in, with what an earlier life has left there. Raises `ConfigError`."""
    return PoolFile.open(
        config.kept_pool_path,
        config.pool_bytes,
        ledger_bytes(config.pool_bytes),
        stamp=STAMP,
        numa_node=numa.node_for(config.numa_node),
    )


def make_pool(config: NodeConfig) -> Pool:
    """A pool that ends with the node and its workers. What an earlier life has kept goes. Raises `ConfigError`."""
    if remove_unused(config.kept_pool_path):
        logger.info("removed the pool that was kept at %s: persist_pool is off now", config.kept_pool_path)
    return Pool.create(
        config.pool_bytes,
        Path(config.pool_path) if config.pool_path else None,
        huge_pages=config.pool_huge_pages,
        numa_node=numa.node_for(config.numa_node),
    )
