"""`LmkvStorage`: what SGLang's cache controller calls, each call delegated to a `PageStore`.

The controller looks up, reads and writes on a thread each. A call that fails, for whatever reason, counts as a miss or
as not stored: SGLang then computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmkv import config as configuration
from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv_client.sglang.host_pool import pool_tensors
from lmkv_client.sglang.page_store import PageCounts, PageStore, logger
from lmkv_client.sglang.sglang_api import (
    HiCacheStorage,
    HostPool,
    PoolTransferResult,
    StorageConfig,
    is_writer,
    shards,
)

if TYPE_CHECKING:
    import torch

SETTINGS = "lmkv"
"""The key of lmkv's own settings in the extra configuration of the backend."""


class LmkvStorage(HiCacheStorage):
    """The backend that `--hicache-storage-backend dynamic` with `class_name` `LmkvStorage` names.

    One for each rank. Needs `interface_v1` 1; keys are SGLang's page hashes, 64 hexadecimal digits each.
    """

    def __init__(self, storage_config: StorageConfig, kwargs: Any = None) -> None:
        """Reads the configuration; `register_mem_pool_host` attaches. Raises `ConfigError` if it is invalid."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError('LmkvStorage: the extra configuration needs "interface_v1": 1', key="interface_v1")
        settings = configuration.load(
            ConnectorConfig, flags=extra.get(SETTINGS), flags_place=f"key {SETTINGS} of the extra configuration"
        )
        self._storage_config = storage_config
        self._is_writer = is_writer(storage_config)
        self._store = PageStore(settings)

    @property
    def counts(self) -> PageCounts:
        """Returns the counts of this rank's pages."""
        return self._store.counts

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Attaches to a node, and describes the pages to the copy kernels.

        Raises `ConfigError` if the node cannot start as configured, or the pages are of a kind that lmkv does not know.
        """
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._storage_config
        if pool.kv_buffer is None:
            self._store.add_other_pool("a host pool that only numbers the pages of others")
            return
        self._store.attach(
            pool_tensors(pool, is_mla=config.is_mla_model),
            model_name=config.model_name or "",
            stored_dtype=str(pool.dtype),
            page_size=pool.page_size,
            shards=shards(config),
        )
        logger.info("layout of the host pool: %s", pool.layout)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Notes a pool. Of models with other pools than that of keys and values, nothing is stored."""
        if (name := str(host_pool_name)) != "kv":
            self._store.add_other_pool(f"a host pool {name}")

    def weights_change(self) -> None:
        """Loads and stores nothing from now on: the keys name the weights that the engine has started with."""
        self._store.weights_change()

    # ---- what is held

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Number of the first `keys` that can be read."""
        return self._store.attempt(self._found, keys, default=0) if self._store.is_of_use else 0

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """As `batch_exists`; 0 if pages of other pools are needed, too."""
        return PoolTransferResult(0 if pool_transfers else self.batch_exists(keys, extra_info), {})

    def exists(self, key: str) -> bool:
        """Whether one page can be read."""
        return self.batch_exists([key]) == 1

    def _found(self, keys: Sequence[str]) -> int:
        with self._store.lookup(keys) as held:
            count = held.hit_count
        self._store.count(looked_up=len(keys), found=count)
        return count

    # ---- reads and writes

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copies pages into the host pool: for each key, whether its page was read. `host_indices` are their slots."""
        store = self._store
        read_count = store.attempt(self._read, keys, host_indices, default=0) if store.is_of_use else 0
        store.count(read=read_count, failed_reads=len(keys) - read_count)
        return [index < read_count for index in range(len(keys))]

    def _read(self, keys: Sequence[str], host_indices: torch.Tensor) -> int:
        pages = self._store.page_numbers(host_indices.tolist(), len(keys))
        with self._store.lookup(keys, is_continued=True) as held:  # `batch_exists` has looked them up and counted them
            return self._store.read(held, pages)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool: for each key, whether its page is held now. `host_indices` are their slots."""
        if not self._is_writer or not self._store.is_of_use:
            return [True] * len(keys)
        before = list(getattr(extra_info, "prefix_keys", None) or [])
        held_count = self._store.attempt(self._write, keys, host_indices, before[-1:], default=0)
        self._store.count(failed_writes=len(keys) - held_count)
        return [index < held_count for index in range(len(keys))]

    def _write(self, keys: Sequence[str], host_indices: torch.Tensor, before: Sequence[str]) -> int:
        return self._store.write(keys, self._store.page_numbers(host_indices.tolist(), len(keys)), before)

    # ---- the older interface, which `interface_v1` replaces

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages are read by `batch_get_v1`."""

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing: pages are read by `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """False: pages are stored by `batch_set_v1`."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """False: pages are stored by `batch_set_v1`."""
        return False

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Reads nothing: these are pages of other pools."""
        return {str(one.name): [False] * len(one.keys or ()) for one in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores nothing: these are pages of other pools."""
        return {str(one.name): [False] * len(one.keys or ()) for one in transfers}

    # ---- life

    def clear(self) -> None:
        """Leaves everything: other engines use it too. `lmkv clear` removes chunks."""
        logger.warning("the pages of a node are not cleared by one engine; use `lmkv clear --model`")

    def get_stats(self) -> None:
        """Returns nothing: the node has the metrics."""

    def close(self) -> None:
        """Detaches from the node, and logs the counts. Idempotent."""
        self._store.close()
