"""`LmkvLinker`: an external linker of SGLang, which copies between a node's pool and SGLang's KV cache.

SGLang's scheduler calls it and waits; it aborts requests whose load fails. So a lookup finds what is in the node's own
pool, which the node keeps there until the page was loaded, and the load is a copy of memory that cannot fail.

    lookup   of a request, in each pass of the scheduler that considers it; locks what it has found
    load     copies at once: the slots are the request's own, and no step runs
    next pass  releases what was not loaded
    offload  queues pages, which SGLang leaves as they are until a thread has copied them

SGLang's ranks call in the same order, and must answer alike: what a rank does never depends on the time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from lmkv import config as configuration
from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.misses import MissReason
from lmkv_client.engine import Extent, Held
from lmkv_client.sglang.host_pool import LayerTensors
from lmkv_client.sglang.linker_api import (
    KV,
    DeviceTransfer,
    LinkerParams,
    UnifiedCacheLinker,
    linker_rank,
    other_pools,
)
from lmkv_client.sglang.page_store import PageCounts, PageStore
from lmkv_client.sglang.sglang_api import is_writer, shards

BUFFERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
)
"""Attributes with the tensors of the layers, by the name of the pool's class. Its subclasses keep something else."""
SCALES = ("k_scale_buffer", "native_k_scale_buffer")
"""Attributes with scales of quantized pages, or None."""


class UnknownPool(ValueError):
    """The KV cache is not of a kind that lmkv can copy."""


def device_tensors(pool: Any, page_size: int) -> LayerTensors:
    """Views of the layers, each `[pages, heads, tokens of a page, elements]`: keys, then values; or latents alone.

    Raises `UnknownPool`, or `ConfigError` if they are not in host memory.
    """
    kind = type(pool).__name__
    if kind not in BUFFERS:
        raise UnknownPool(f"a KV cache {kind}")
    if any(getattr(pool, name, None) is not None for name in SCALES):
        raise UnknownPool("a KV cache with scales")
    parts = [getattr(pool, name, None) for name in BUFFERS[kind]]
    if not all(part and all(layer.dim() == 3 for layer in part) for part in parts):
        raise UnknownPool(f"a KV cache {kind} of other tensors than [slot, head, element]")
    devices = {str(layer.device) for part in parts for layer in part or () if layer.device.type != "cpu"}
    if devices:
        raise ConfigError(
            f"LmkvLinker: the KV cache is on {', '.join(sorted(devices))}, and this version of lmkv links KV caches in "
            "host memory only; use the storage backend LmkvStorage"
        )
    return [[_by_page(layer, page_size) for layer in part] for part in parts if part]


def _by_page(layer: Any, page_size: int) -> Any:
    page_count = layer.shape[0] // page_size
    return layer[: page_count * page_size].unflatten(0, (page_count, page_size)).transpose(1, 2)


MAX_FETCHES = 8
"""Requests whose pages are fetched at the same time from other tiers than the pool."""
MAX_WAITING_OFFLOADS = 16
"""If more of them wait, pages are stored only where extents are free: SGLang cannot evict pages that wait."""


class NothingToWaitFor:
    """SGLang's layers wait for this in a step. It never blocks, since pages are loaded before the step begins."""

    def set_consumer(self, index: int) -> None:
        """Nothing."""

    def wait_until(self, layer: int) -> None:
        """Returns at once."""


class LmkvLinker(UnifiedCacheLinker):
    """The linker that `--unified-cache-external-linker-config` names, one for each rank. For KV caches in host memory.

    All methods but `close` are called on the scheduler's thread.
    """

    def __init__(
        self,
        server_args: Any,
        params: LinkerParams,
        *,
        components: Collection[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Attaches to a node. `extra_config` has settings of lmkv, over those of the environment.

        A KV cache of a kind that lmkv does not know is served without lmkv, and a warning says so. Raises `ConfigError`
        if a setting is invalid, the node cannot start as configured, or the KV cache is not in host memory.
        """
        settings = configuration.load(ConnectorConfig, flags=extra_config, flags_place="linker_extra_config")
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {KV: pool}
        self.forward_stream = forward_stream
        self.layer_done_counter = NothingToWaitFor()
        self._store = PageStore(settings)
        self._is_writer = False
        self._found: dict[str, _Found] = {}
        """The hits that this pass of the scheduler has found and not loaded yet, by request."""
        self._fetching: set[str] = set()
        """Requests whose pages are being fetched into the pool."""
        self._offloads: queue.Queue[DeviceTransfer | None] = queue.Queue()
        self._stored: deque[bool] = deque()
        """Results of offloads, in order."""
        for name in other_pools(params, components):
            self._store.add_other_pool(f"a pool {name}")
        try:
            tensors = device_tensors(pool, params.page_size)
        except UnknownPool as error:
            self._store.add_other_pool(str(error))
        else:
            rank = linker_rank(server_args, params, is_mla=len(tensors) == 1)
            self._is_writer = is_writer(rank)
            self._store.attach(
                tensors,
                model_name=rank.model_name or "",
                stored_dtype=str(tensors[0][0].dtype),
                page_size=params.page_size,
                shards=shards(rank),
            )
        self._thread = threading.Thread(target=self._offload_all, name="lmkv-offload", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> PageCounts:
        """Returns the counts of this rank's pages."""
        return self._store.counts

    # ---- lookups and loads

    def lookup(self, rid: str, transfers: Sequence[DeviceTransfer]) -> list[int]:
        """Lengths, in pages, of the prefixes of a request's missing pages that are in the node's pool.

        They stay there until they are loaded, or until the scheduler's next pass. Pages behind them that disk, peers or
        the remote store have are fetched into the pool, for later requests. Blocks for at most `lookup_timeout`.
        """
        names = _names(transfers)
        found = self._found.get(rid)
        if found is None or found.names != names:
            self._forget(rid)
            self._store.count(looked_up=len(names))
            held = self._store.attempt(self._look_up, rid, names, default=None) if self._store.is_of_use else None
            if held is None:
                return []
            found = self._found[rid] = _Found(names, held, self._store.attempt(self._fetch, rid, held, default=None))
            self._store.count(found=held.own_count)
        return list(range(1, found.held.own_count + 1))

    def _look_up(self, rid: str, names: Sequence[str]) -> Held:
        return self._store.lookup(names, engine_request_id=rid)

    def _fetch(self, rid: str, held: Held) -> Future[list[Extent]] | None:
        """Has the node fetch what it does not have in its pool; None if there is nothing to fetch."""
        if held.hit_count == held.own_count:
            return None
        held.refuse(held.own_count, reason=MissReason.SLOWER)
        if rid in self._fetching or len(self._fetching) >= MAX_FETCHES:
            return None
        fetch = held.begin_load(timeout=self._store.settings.load_timeout)
        self._fetching.add(rid)
        fetch.add_done_callback(lambda _: self._fetching.discard(rid))
        return fetch

    def load(self, rid: str, transfers: Sequence[DeviceTransfer]) -> bool:
        """Copies the first pages of the request's last lookup into these slots. False: nothing was found."""
        found, names = self._found.get(rid), _names(transfers)
        if found is None or found.names[: len(names)] != names or found.held.own_count < len(names):
            return False
        count = self._store.attempt(self._read, found.held, transfers[0], default=0)
        self._store.count(read=count, failed_reads=len(names) - count)
        self._forget(rid)
        return count == len(names)

    def _read(self, held: Held, transfer: DeviceTransfer) -> int:
        return self._store.read(held, self._pages(transfer))

    def start_layer_wise_loading(self) -> int:
        """Nothing: `load` has copied. Returns the index of no batch."""
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """True: what was loaded is complete."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """True: nothing writes to the slots any more."""
        return True

    # ---- stores

    def offload(self, transfers: Sequence[DeviceTransfer], session_id: str | None = None) -> bool:
        """Queues pages. SGLang keeps them as they are until their result was taken. False: there are none."""
        if not _names(transfers):
            return False
        self._offloads.put(transfers[0])
        return True

    def num_completed_offloads(self) -> int:
        """Results that were not taken. The scheduler asks at the beginning of each pass: locks of the last one end."""
        for rid in list(self._found):
            self._forget(rid)
        return len(self._stored)

    def pop_completed_offload(self) -> bool:
        """Takes the oldest result: whether the pages are held."""
        return self._stored.popleft()

    def _offload_all(self) -> None:
        """Runs on a thread of its own."""
        while (transfer := self._offloads.get()) is not None:
            self._stored.append(self._offload(transfer))
            self._offloads.task_done()

    def _offload(self, transfer: DeviceTransfer) -> bool:
        if not self._is_writer or not self._store.is_of_use:
            return True  # SGLang need not try again
        count = len(transfer.keys or ())
        held_count = self._store.attempt(self._write, transfer, default=0)
        self._store.count(failed_writes=count - held_count)
        return held_count == count

    def _write(self, transfer: DeviceTransfer) -> int:
        is_late = self._offloads.qsize() > MAX_WAITING_OFFLOADS
        return self._store.write(transfer.keys or (), self._pages(transfer), timeout=0.0 if is_late else None)

    # ---- life

    def reset(self) -> None:
        """Releases what was found, and waits for offloads."""
        for rid in list(self._found):
            self._forget(rid)
        self._offloads.join()
        self._stored.clear()

    def close(self) -> None:
        """Detaches from the node, and logs the counts. Idempotent."""
        if self._thread.is_alive():
            self.reset()
            self._offloads.put(None)
            self._thread.join()
        self._store.close()

    def _pages(self, transfer: DeviceTransfer) -> list[int]:
        assert transfer.device_indices is not None
        return self._store.page_numbers(transfer.device_indices.tolist(), len(transfer.keys or ()))

    def _forget(self, rid: str) -> None:
        if found := self._found.pop(rid, None):
            found.release()


class _Found:
    """The hit of one request's lookup."""

    def __init__(self, names: Sequence[str], held: Held, fetch: Future[list[Extent]] | None) -> None:
        self.names = names
        self.held = held
        self._fetch = fetch

    def release(self) -> None:
        """Releases it once nothing is being fetched of it."""
        if self._fetch is None:
            self.held.release()
        else:
            self._fetch.add_done_callback(self._fetched)

    def _fetched(self, _: Future[list[Extent]]) -> None:
        self.held.refuse(self.held.own_count, reason=MissReason.SLOWER)  # the request did not wait for it
        self.held.release()


def _names(transfers: Sequence[DeviceTransfer]) -> list[str]:
    """SGLang's names of the pages: with one pool, there is one transfer."""
    return list(transfers[0].keys or ()) if transfers else []
