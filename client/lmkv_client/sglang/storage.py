"""`LmkvStorage`: what SGLang's cache controller calls, each call delegated to `lmkv_client.engine`.

The controller looks up, reads and writes on a thread each. A call that fails, for whatever reason, counts as a miss or
as not stored: SGLang then computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lmkv import config as configuration
from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv_client.engine import Copier, Engine, Written
from lmkv_client.sglang.host_pool import make_pages, page_numbers, pool_tensors
from lmkv_client.sglang.kv_spec import identity_across_engines, identity_of, kv_dtype, make_spec
from lmkv_client.sglang.sglang_api import (
    HiCacheStorage,
    HostPool,
    PoolTransferResult,
    StorageConfig,
    is_writer,
    served_model,
    shards,
    used_config,
    watch_weight_updates,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("sglang.lmkv")

SETTINGS = "lmkv"
"""The key of lmkv's own settings in the extra configuration of the backend."""
WARNING_SECONDS = 10.0
"""Least time between two warnings about failed calls."""

Result = TypeVar("Result")


@dataclass(slots=True)
class PageCounts:
    """Pages that SGLang asked for or gave since the start, and calls that failed."""

    looked_up: int = 0
    found: int = 0
    read: int = 0
    failed_reads: int = 0
    written: int = 0
    held_before: int = 0
    """Pages that were not written because the node had them."""
    failed_writes: int = 0
    failed_calls: int = 0


class LmkvStorage(HiCacheStorage):
    """The backend that `--hicache-storage-backend dynamic` with `class_name` `LmkvStorage` names.

    One for each rank. Needs `interface_v1` 1; keys are SGLang's page hashes, 64 hexadecimal digits each.
    """

    def __init__(self, storage_config: StorageConfig, kwargs: Any = None) -> None:
        """Reads the configuration; `register_mem_pool_host` attaches. Raises `ConfigError` if it is invalid."""
        extra = dict(storage_config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ConfigError('LmkvStorage: the extra configuration needs "interface_v1": 1', key="interface_v1")
        self._settings = configuration.load(
            ConnectorConfig, flags=extra.get(SETTINGS), flags_place=f"key {SETTINGS} of the extra configuration"
        )
        for notice in self._settings.notices:
            logger.warning("%s", notice)
        self._storage_config = storage_config
        self._is_writer = is_writer(storage_config)
        self._engine: Engine | None = None
        self._copier: Copier | None = None
        self._tensors: Any = None
        """Keep the memory of the pages alive."""
        self._page_size = 0
        self._other_pools: set[str] = set()
        self._weights_changed = False
        self.counts = PageCounts()
        self._lock = threading.Lock()
        """Of the counts."""
        self._warned_at = -WARNING_SECONDS

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Attaches to a node, and describes the pages to the copy kernels.

        Raises `ConfigError` if the node cannot start as configured, or the pages are of a kind that lmkv does not know.
        """
        super().register_mem_pool_host(mem_pool_host)
        pool, config = mem_pool_host, self._storage_config
        if pool.kv_buffer is None:
            self._add_other_pool("that only numbers the pages of others")
            return
        model_name = config.model_name or ""
        model = served_model(model_name)
        self._tensors = pool_tensors(pool, is_mla=config.is_mla_model)
        dtype, own_share = kv_dtype(str(pool.dtype), model.kv_cache_dtype), shards(config)
        model_id = self._settings.model_id
        if self._settings.share_across_engines:
            model_id = identity_across_engines(
                model, used_config(model), model_id=model_id, kv_dtype=dtype, shards=own_share
            )
        spec = make_spec(
            self._tensors,
            model_name=model_name,
            model_id=model_id or identity_of(model),
            kv_dtype=dtype,
            page_size=pool.page_size,
            shards=own_share,
            weight_version=self._settings.weight_version,
        )
        engine = Engine.attach(spec, config=self._settings)
        try:
            self._copier = engine.register(make_pages(self._tensors))
        except ValueError as error:
            engine.close()
            raise ConfigError(f"LmkvStorage: this version of lmkv cannot copy the host pool: {error}") from None
        self._page_size = pool.page_size
        self._engine = engine
        watch_weight_updates(self)
        logger.info(
            "pages of %d tokens, layout %s, %d bytes each; model %s",
            pool.page_size,
            pool.layout,
            spec.chunk_bytes,
            spec.model_id,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Notes a pool. Of models with other pools than that of keys and values, nothing is stored."""
        name = str(host_pool_name)
        if name != "kv" and name not in self._other_pools:
            self._add_other_pool(name)

    def _add_other_pool(self, name: str) -> None:
        self._other_pools.add(name)
        logger.warning("this version of lmkv stores nothing of models with a host pool %s", name)

    def weights_change(self) -> None:
        """Loads and stores nothing from now on: the keys name the weights that the engine has started with."""
        if not self._weights_changed:
            self._weights_changed = True
            logger.warning("weights change in place: nothing is loaded or stored until the engine restarts")

    @property
    def _is_of_use(self) -> bool:
        """Whether there are pages that can be loaded and stored."""
        return not self._other_pools and not self._weights_changed

    # ---- what is held

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Number of the first `keys` that can be read."""
        return self._attempt(self._found, keys, default=0) if self._is_of_use else 0

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """As `batch_exists`; 0 if pages of other pools are needed, too."""
        return PoolTransferResult(0 if pool_transfers else self.batch_exists(keys, extra_info), {})

    def exists(self, key: str) -> bool:
        """Whether one page can be read."""
        return self.batch_exists([key]) == 1

    def _found(self, keys: Sequence[str]) -> int:
        engine = self._attached()
        with engine.lookup(engine.foreign_keys(keys), timeout=self._settings.lookup_timeout) as held:
            count = held.hit_count
        self._count(looked_up=len(keys), found=count)
        return count

    # ---- reads and writes

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Copies pages into the host pool: for each key, whether its page was read. `host_indices` are their slots."""
        read_count = self._attempt(self._read, keys, host_indices, default=0) if self._is_of_use else 0
        self._count(read=read_count, failed_reads=len(keys) - read_count)
        return [index < read_count for index in range(len(keys))]

    def _read(self, keys: Sequence[str], host_indices: torch.Tensor) -> int:
        engine = self._attached()
        pages = page_numbers(host_indices.tolist(), self._page_size, len(keys))
        chunk_keys = engine.foreign_keys(keys)  # which `batch_exists` has looked up and counted
        with engine.lookup(chunk_keys, is_continued=True, timeout=self._settings.lookup_timeout) as held:
            extents = list(held.load(timeout=self._settings.load_timeout))
            assert self._copier is not None
            self._copier.scatter(extents, [[page] for page in pages[: len(extents)]])
        return len(extents)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool: for each key, whether its page is held now. `host_indices` are their slots."""
        if not self._is_writer or not self._is_of_use:
            return [True] * len(keys)
        before = list(getattr(extra_info, "prefix_keys", None) or [])
        held_count = self._attempt(self._write, keys, host_indices, before[-1:], default=0)
        self._count(failed_writes=len(keys) - held_count)
        return [index < held_count for index in range(len(keys))]

    def _write(self, keys: Sequence[str], host_indices: torch.Tensor, before: Sequence[str]) -> int:
        engine = self._attached()
        pages = page_numbers(host_indices.tolist(), self._page_size, len(keys))
        chunk_keys = engine.foreign_keys(keys)
        parents: list[bytes] = [*engine.foreign_keys(before), *chunk_keys] if before else [b"", *chunk_keys]
        at = held_before = len(keys) - len(engine.missing(chunk_keys, timeout=self._settings.lookup_timeout))
        deadline = time.monotonic() + self._settings.load_timeout
        while at < len(keys) and (left := deadline - time.monotonic()) > 0:
            extents = engine.reserve(len(keys) - at, timeout=left)
            if not extents:
                break
            end = at + len(extents)
            try:
                assert self._copier is not None
                sums = self._copier.gather(extents, [[page] for page in pages[at:end]])
            except ValueError:
                engine.put_back(extents)
                raise
            engine.commit(Written.chain(chunk_keys[at:end], extents, parent=parents[at], checksums=sums))
            at = end
        self._count(written=at - held_before, held_before=held_before)
        return at

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
        """None: the node has the metrics."""

    def close(self) -> None:
        """Detaches from the node, and logs the counts. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            missed = engine.counters.miss_tokens
            logger.info("pages: %s", ", ".join(f"{name} {count}" for name, count in asdict(self.counts).items()))
            logger.info("missed tokens: %s", ", ".join(f"{count} {name}" for name, count in missed.items()) or "none")

    def _attached(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("not attached")
        return self._engine

    def _attempt(self, call: Callable[..., Result], *arguments: Any, default: Result) -> Result:
        """What the call returns, or `default` if it fails: SGLang never restarts a thread that an error has ended."""
        try:
            return call(*arguments)
        except Exception as error:
            self._count(failed_calls=1)
            if time.monotonic() - self._warned_at > WARNING_SECONDS:
                self._warned_at = time.monotonic()
                logger.warning("a call failed, and its pages count as misses: %s", error, exc_info=True)
            return default

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)
