"""Lets LMCache's in-process connector run with vLLM on CPUs: it ships no copy between vLLM's CPU pages and its memory.

Only `rivals` and `multi_turn` use it, in LMCache's own environment, by vLLM's `kv_connector_module_path`. Lookup,
allocation, control and transfer stay LMCache's; the speed of the copies is not its own. Made for LMCache 0.5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import lmcache.v1.gpu_connector as gpu_connector  # type: ignore[import-not-found]
import torch
from lmcache.utils import EngineType  # type: ignore[import-not-found]
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.p2p_backend import P2PBackend  # type: ignore[import-not-found]

TICK_SECONDS = 0.001


class CpuConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Moves whole blocks, as they are: `[layer][block]` in LMCache's memory, which never looks inside."""

    def __init__(self, metadata: Any) -> None:
        self._layer_count, _, _, head_count, head_size = metadata.kv_shape
        self._hidden_size = head_count * head_size
        self.kvcaches: Sequence[torch.Tensor] | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        """See LMCache."""
        return torch.Size([2, self._layer_count, num_tokens, self._hidden_size])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """See LMCache: pages to memory."""
        for pages, slabs, blocks in self._layers(memory_obj, start, end, kwargs):
            for slab, block in zip(slabs, blocks, strict=True):
                slab.copy_(pages[block])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """See LMCache: memory to pages, but for those that vLLM had itself."""
        computed = max(0, int(kwargs.get("vllm_cached_tokens", 0)) - start)
        for pages, slabs, blocks in self._layers(memory_obj, start, end, kwargs):
            skipped = -(-computed // pages.shape[2])
            for slab, block in zip(slabs[skipped:], blocks[skipped:], strict=True):
                pages[block].copy_(slab)

    def batched_from_gpu(self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any) -> None:
        """See LMCache."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        """See LMCache."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def _layers(self, memory_obj: Any, start: int, end: int, kwargs: dict[str, Any]) -> Any:
        """Per layer its pages, the chunk's blocks in memory, and their ids. Raises `ValueError` for parts of blocks."""
        self.initialize_kvcaches_ptr(**kwargs)
        assert self.kvcaches is not None
        block_size = self.kvcaches[0].shape[2]
        slots = kwargs["slot_mapping"][start:end]
        if slots.numel() % block_size or int(slots[0]) % block_size:
            raise ValueError(f"tokens {start} to {end} are not whole blocks of {block_size}")
        blocks = (slots[::block_size] // block_size).tolist()
        memory = memory_obj.tensor.view(-1).view(self._layer_count, -1)
        for pages, slab in zip(self.kvcaches, memory, strict=True):
            yield pages, slab.view(len(blocks), *pages.shape[1:]), blocks


_create = gpu_connector.CreateGPUConnector


def create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
    """LMCache's choice of a connector, and ours for CPUs, for which it has none."""
    if engine == EngineType.VLLM and gpu_connector.torch_device_type == "cpu":
        return CpuConnector(metadata)
    return _create(config, metadata, engine, layout_hints=layout_hints)


gpu_connector.CreateGPUConnector = create
_start_p2p = P2PBackend.__init__


def start_p2p(self: Any, config: Any, metadata: Any, loop: asyncio.AbstractEventLoop, *rest: Any, **more: Any) -> None:
    """Keeps the backend's loop awake, in LMCache's favour.

    It awaits answers that another loop receives, and otherwise notices them only when something else wakes it, seconds
    later.
    """

    async def tick() -> None:
        while True:  # noqa: ASYNC110  # it is the waking up that counts
            await asyncio.sleep(TICK_SECONDS)

    asyncio.run_coroutine_threadsafe(tick(), loop)
    _start_p2p(self, config, metadata, loop, *rest, **more)


P2PBackend.__init__ = start_p2p

from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["LMCacheConnectorV1Dynamic"]
