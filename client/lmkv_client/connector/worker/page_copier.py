"""Pages of one rank in the format that chunks have, and copies between them and the pool, for pages in host memory.

Native tiles are the engine's blocks as they are. Token-major chunks have each token's key and value side by side: what
an engine of any block size and page layout can make of its own, provided that lmkv knows how it keeps a block. vLLM's
layouts on GPUs are known; how its CPU attention packs a block is tried out before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch

from lmkv.errors import ConfigError
from lmkv.pool.pool import Pool
from lmkv.spec import LOSSY_DTYPES, NATIVE_TILES, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.vllm_api import cpu_store_kv
from lmkv_client.connector.worker.running_copies import CopyHandle, GatherTask, ThreadTask, begin_each, grouped_bytes
from lmkv_client.processors import use_processors
from lmkv_kernels import ChunkCopy, Pages, gather, packed_rows, scatter, token_rows, whole_states, whole_tiles

if TYPE_CHECKING:
    from lmkv_client.connector.worker.device_buffer import DeviceBufferPart

INLINE_BYTES = 4 << 20
"""Copies of at most this size run inline: they take less time than starting another thread."""
INLINE_GATHER_BYTES = 1 << 20
"""The same of gathers, which sum the words, too, and which the first token of an answer would wait for."""
PART_BLOCKS = 64
"""Most blocks of one task of the copy thread."""


class PageCopier(Protocol):
    """Copies between one rank's pages and the open pool. Called on the worker's main thread."""

    @property
    def ready(self) -> bool:
        """Whether copies can be made: a pool is open, and what it needs has been done."""

    def open(self, pool: Pool) -> None:
        """Uses a pool, which must stay mapped until the callback of `close_pool`."""

    def close_pool(self, then: Callable[[], object]) -> None:
        """Waits for running copies and calls `then` once the pool may be unmapped, possibly on another thread."""

    def settle(self) -> None:
        """Waits until no copy uses pages any more."""

    def begin_step(self) -> None:
        """Called before a step's loads and its forward pass, both of which change pages."""

    def gather(self, copies: Sequence[ChunkCopy], *, beside: bool = True) -> CopyHandle:
        """Begins to copy pages into the pool, as the last forward leaves them.

        `beside`: whether the caller continues meanwhile; if so it calls `begin_step` before pages change.

        Raises `ValueError` if a copy does not fit, `RuntimeError` if it cannot be made now; the handle may, too.
        """

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Begins to copy into pages, before the next forward reads them if `sync`. Raises as `gather` does.

        The copies are out of the pool, or out of a device buffer, which must then stay until they are done.
        """

    def close(self) -> None:
        """Waits for running copies and releases all resources. Idempotent."""


class HostPageCopier:
    """Copies for pages in host memory, on threads unless they are small.

    vLLM has pinned the worker's main thread to processors of its own; these threads may use all.
    """

    def __init__(self, pages: Sequence[Pages], threads: int) -> None:
        """`pages` are those of each KV-cache group."""
        self._pages = pages
        self._threads = threads
        self._pool: Pool | None = None
        self._loader = ThreadPoolExecutor(1, "lmkv-load", initializer=use_processors)
        self._storer = ThreadPoolExecutor(1, "lmkv-store", initializer=use_processors)
        self._gathers: list[CopyHandle] = []
        """Gathers that may still read pages."""

    @property
    def ready(self) -> bool:
        """Implements `PageCopier`."""
        return self._pool is not None

    def open(self, pool: Pool) -> None:
        """Implements `PageCopier`."""
        self._pool = pool

    def close_pool(self, then: Callable[[], object]) -> None:
        """Implements `PageCopier`."""
        self.settle()
        self._pool = None
        then()

    def settle(self) -> None:
        """Implements `PageCopier`."""
        for thread in (self._loader, self._storer):
            with suppress(RuntimeError):  # the interpreter exits: it has waited for both threads, and starts no more
                thread.submit(int).result()  # comes after all the others; each takes milliseconds

    def begin_step(self) -> None:
        """Waits for gathers: the pages that they read may change in this step."""
        gathers, self._gathers = self._gathers, []
        for gathering in gathers:
            with suppress(ValueError, RuntimeError):  # who asks whether it is done learns of it
                gathering.wait()

    def gather(self, copies: Sequence[ChunkCopy], *, beside: bool = True) -> CopyHandle:
        """Implements `PageCopier`."""
        inline = not beside or grouped_bytes(self._pages, copies) <= INLINE_GATHER_BYTES
        memory = self._opened().buffer

        def begin(group: int, own: Sequence[ChunkCopy]) -> CopyHandle:
            copy = partial(gather, self._pages[group], memory, own, threads=self._threads)
            if inline:
                return ThreadTask(checksums=copy())
            self._gathers.append(GatherTask(self._storer.submit(copy)))
            return self._gathers[-1]

        return begin(0, copies) if len(self._pages) == 1 else begin_each(copies, len(self._pages), begin)

    def scatter(self, copies: Sequence[ChunkCopy], *, sync: bool, buffer: DeviceBufferPart | None = None) -> CopyHandle:
        """Copies before it returns if `sync`, or if that is faster than starting another thread."""
        pages, memory = ([buffer.pages], buffer.bytes) if buffer else (self._pages, self._opened().buffer)
        copies = buffer.shrunk(copies) if buffer else copies
        inline = grouped_bytes(pages, copies) <= INLINE_BYTES

        def begin(group: int, own: Sequence[ChunkCopy]) -> CopyHandle:
            copy = partial(scatter, pages[group], memory, threads=self._threads)
            if inline:
                copy(own)
                return ThreadTask()
            if sync:
                self._loader.submit(copy, own).result()
                return ThreadTask()
            return ThreadTask([self._loader.submit(copy, part) for part in split(own)])

        return begin(0, copies) if len(pages) == 1 else begin_each(copies, len(pages), begin)

    def close(self) -> None:
        """Implements `PageCopier`."""
        self._loader.shutdown(cancel_futures=True)
        self._storer.shutdown(cancel_futures=True)

    def _opened(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("no pool is open")
        return self._pool


def split(copies: Sequence[ChunkCopy]) -> list[list[ChunkCopy]]:
    """The copies in parts that run one after the other."""
    parts: list[list[ChunkCopy]] = []
    count = PART_BLOCKS
    for copy in copies:
        if count >= PART_BLOCKS:
            parts.append([])
            count = 0
        parts[-1].append(copy)
        count += len(copy.block_ids)
    return parts


TRIAL_BLOCKS = 3


def make_pages(tensors: Sequence[torch.Tensor], spec: KvSpec, group: LayerGroup, *, first_head: int) -> Pages:
    """The pages of one rank's layers of a KV-cache group, for chunks of this spec.

    `tensors` are `[blocks, heads, block size, content]` per layer, or `[blocks, 1, 1, state]`. Raises `ValueError` if
    the pages cannot be had.
    """
    part = spec.parts[group.part]
    make: Callable[..., Pages] = whole_tiles
    if part.rule == PART_RULE_END:
        make = partial(whole_states, chunk_tokens=spec.chunk_size)
    elif spec.format != NATIVE_TILES:
        is_packed = tensors[0].device.type == "cpu"
        make = packed_rows if is_packed else partial(token_rows, part_count=1 if part.mla else 2)
    pages = make(tensors, first_head, part.kv_head_count, first_layer=group.first_layer, layer_count=part.layer_count)
    size_bytes, expected = pages.extent_bytes(part.kept_tokens(spec.chunk_size)), spec.part_bytes(group.part)
    if size_bytes != expected:
        raise ValueError(
            f"a chunk of this engine's pages has {size_bytes} bytes, and its KvSpec says {expected}: "
            "its layers are not all alike, or keep something besides keys and values"
        )
    if part.rule != PART_RULE_END and pages.block_tokens != group.block_size:
        raise ValueError(
            f"the attention kernels use blocks of {pages.block_tokens} tokens, and the engine's have "
            f"{group.block_size}: set its --block-size to {pages.block_tokens}"
        )
    return pages


def check_packing(isa: str, head_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Tries out whether this engine's CPU attention packs a block as `packed_rows` has it.

    vLLM stores some random keys and values, and they are read back. Raises `ConfigError` if they are not the same.
    """

    heads, tokens = 2, TRIAL_BLOCKS * block_size
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(tokens, heads, head_size, generator=generator).to(dtype) for _ in range(2))
    pages_memory = torch.zeros(TRIAL_BLOCKS + 1, heads, block_size, 2 * head_size, dtype=dtype)
    # As vLLM's CPU attention divides it up.
    halves = pages_memory.view(TRIAL_BLOCKS + 1, heads, 2 * block_size, head_size).chunk(2, dim=2)
    block_ids = list(range(TRIAL_BLOCKS, 0, -1))
    slots = torch.tensor([block * block_size + slot for block in block_ids for slot in range(block_size)])
    try:
        cpu_store_kv(keys, values, halves, slots, isa)
        pages = packed_rows([pages_memory], 0, heads)
    except (RuntimeError, ValueError) as error:
        raise _unknown(isa, str(error)) from None
    chunk = torch.zeros(pages.extent_bytes(tokens), dtype=torch.uint8)
    copy = ChunkCopy(offset=0, extent_tokens=tokens, token_count=tokens, block_ids=block_ids)
    gather(pages, chunk.numpy(), [copy])
    expected = torch.stack([keys, values]).permute(2, 0, 1, 3).contiguous()  # [head, part, token, element]
    if not torch.equal(chunk, expected.view(torch.uint8).flatten()):
        raise _unknown(isa, "keys and values were not where they should be")


@cache
def is_packed(part: KvPart) -> bool:
    """Whether the native tiles of a part are packed as `packed_rows` has them; False if that is not known."""
    if not part.tile_isa or part.mla or part.kv_dtype not in LOSSY_DTYPES:
        return False
    try:
        check_packing(part.tile_isa.split("-")[0], part.head_size, part.block_size, getattr(torch, part.kv_dtype))
    except ConfigError:
        return False
    return True


def _unknown(isa: str, why: str) -> ConfigError:
    return ConfigError(
        f"kv_format: how the CPU attention's kernel {isa!r} packs a block is not known to this version of lmkv "
        f"({why}); use kv_format native",
        key="kv_format",
    )
