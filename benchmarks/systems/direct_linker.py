"""An external linker of SGLang that copies between lmkv's pool and SGLang's KV cache directly, without HiCache.

For measurements only: SGLang 0.5.23 aborts requests whose load fails, and its scheduler waits for lookups. Runs in the
processes of SGLang. Finds pages in the node's own pool only; they are those of `LmkvStorage`.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from lmkv import config as configuration
from lmkv.config import ConnectorConfig
from lmkv_client.engine import Engine, Held, Written
from lmkv_client.sglang.host_pool import layer_tensors, make_pages, page_numbers
from lmkv_client.sglang.kv_spec import identity_of, kv_dtype, make_spec
from lmkv_client.sglang.sglang_api import served_model


class LoadsDone:
    """What SGLang's layers wait for: all their pages are loaded before a step begins."""

    def set_consumer(self, index: int) -> None:
        """Nothing: there is nothing to wait for."""

    def wait_until(self, layer: int) -> None:
        """Returns at once."""


class DirectLinker(UnifiedCacheLinker):
    """What `--unified-cache-external-linker-config` names; for one rank."""

    def __init__(
        self, server_args: Any, params: Any, *, components: Any, extra_config: Any, forward_stream: Any = None
    ) -> None:
        """Attaches to the node that `LMKV_...` in the environment name."""
        settings = configuration.load(ConnectorConfig)
        cache = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: cache}
        self.forward_stream = forward_stream
        self.layer_done_counter = LoadsDone()
        self._page_size: int = params.page_size
        tensors = [
            [layer_tensors(layer.unsqueeze(0), "layer_first", self._page_size)[0] for layer in layers]
            for layers in (cache.k_buffer, cache.v_buffer)
        ]
        model = served_model(str(server_args.model_path))
        spec = make_spec(
            tensors,
            model_name=str(server_args.served_model_name),
            model_id=settings.model_id or identity_of(model),
            kv_dtype=kv_dtype(str(cache.k_buffer[0].dtype), model.kv_cache_dtype),
            page_size=self._page_size,
            shards={},
        )
        self._settings = settings
        self._engine = Engine.attach(spec, config=settings)
        self._copier = self._engine.register(make_pages(tensors))
        self._found: dict[str, Held] = {}
        self._queued: dict[str, tuple[Held, list[int]]] = {}
        self._offloads: deque[bool] = deque()
        self._counter_index = -1
        self._is_loaded = True

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths of the prefixes, in pages, that are in the node's pool. Keeps them there for `load`."""
        if earlier := self._found.pop(rid, None):
            earlier.release()
        keys = self._engine.foreign_keys(transfers[0].keys)
        found = self._engine.lookup(keys, timeout=self._settings.lookup_timeout)
        if found.own_count:
            self._found[rid] = found
        return list(range(1, found.own_count + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues the pages of the last lookup."""
        found, pages = self._found.pop(rid, None), self._pages(transfers[0])
        if found is None or found.own_count < len(pages):
            return False
        self._queued[rid] = (found, pages)
        return True

    def start_layer_wise_loading(self) -> int:
        """Copies what is queued, all layers at once."""
        if not self._queued:
            return -1
        for found, pages in self._queued.values():
            extents = list(found.load(len(pages), timeout=self._settings.load_timeout))
            self._is_loaded = len(extents) == len(pages)
            self._copier.scatter(extents, [[page] for page in pages[: len(extents)]])
            found.release()
        self._queued.clear()
        self._counter_index += 1
        return self._counter_index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether everything was loaded."""
        return self._is_loaded

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether the load had not begun."""
        queued = self._queued.pop(rid, None)
        if queued:
            queued[0].release()
        return queued is not None

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Stores the pages that the node lacks."""
        keys, pages = self._engine.foreign_keys(transfers[0].keys), self._pages(transfers[0])
        at = len(keys) - len(self._engine.missing(keys, timeout=self._settings.lookup_timeout))
        extents = self._engine.reserve(len(keys) - at, timeout=self._settings.load_timeout)
        end = at + len(extents)
        sums = self._copier.gather(extents, [[page] for page in pages[at:end]])
        parent = keys[at - 1] if at else b""
        self._engine.commit(Written.chain(keys[at:end], extents, parent=parent, checksums=sums))
        self._offloads.append(end == len(keys))
        return True

    def num_completed_offloads(self) -> int:
        """Offloads whose result was not asked for."""
        return len(self._offloads)

    def pop_completed_offload(self) -> bool:
        """The result of the oldest one."""
        return self._offloads.popleft()

    def reset(self) -> None:
        """Forgets lookups and loads."""
        for found in (*self._found.values(), *(found for found, _ in self._queued.values())):
            found.release()
        self._found.clear()
        self._queued.clear()
        self._offloads.clear()

    def close(self) -> None:
        """Detaches."""
        self.reset()
        self._engine.close()

    def _pages(self, transfer: Any) -> list[int]:
        return page_numbers(transfer.device_indices.tolist(), self._page_size, len(transfer.keys))
