"""Extents: places of chunks in the node's pool, and copies between them and an engine's pages in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Self

from lmkv.keys import ChunkKey
from lmkv.pool.socket import AttachedPool
from lmkv.spec import KvSpec
from lmkv_kernels import ChunkCopy, Pages, copied_bytes, gather, scatter


class MappedPool:
    """The pool of one attachment. It stays mapped while any extent or view of it exists, also after `retire`."""

    def __init__(self, attached: AttachedPool) -> None:
        self.memory = attached.pool.buffer[:]
        """Returns a view of all its bytes, which keeps the memory mapped."""
        self._attached = attached

    def retire(self) -> None:
        """Unmaps the pool once no extent of it is used. The node reuses the memory of these only after that."""
        self._attached.close_when_unused()

    def extent(self, offset: int, size_bytes: int, token_count: int, checksum: int = 0) -> Extent:
        """The extent at an offset in bytes."""
        view = self.memory[offset : offset + size_bytes]
        return Extent(
            view=view, size_bytes=size_bytes, token_count=token_count, offset=offset, checksum=checksum, pool=self
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extent:
    """The bytes of one chunk in the node's pool, which is shared memory.

    Token-major, in C order: `[layer][KV head][key, value][token][head_size]` of the spec's `kv_dtype`; with MLA
    `[layer][1][1][token][head_size]`. Write only into what `Engine.reserve` returned, until it is committed or put
    back. What a load returned may be read until `Held.release`. The memory stays mapped while the extent or a view
    exists.
    """

    view: memoryview
    """The bytes: one dimension, format `B`, writable. `numpy.frombuffer` and `torch.frombuffer` take it."""
    size_bytes: int
    """Length of `view`."""
    token_count: int
    """Tokens of the chunk; of a reserved extent the spec's `chunk_size`."""
    offset: int
    """Bytes from the start of the pool."""
    checksum: int
    """Checksum of the bytes (docs/contribute/checksum.md); 0 of a reserved extent."""
    pool: MappedPool = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A chunk that was written into a reserved extent, to be committed."""

    key: ChunkKey
    extent: Extent
    token_count: int = 0
    """Tokens of the chunk; 0: full. A shorter chunk has no gaps: `[layer][head][part][token_count][head_size]`."""
    parent: bytes = b""
    """Key of the chunk before it, which the node does not evict before this chunk; empty if there is none."""
    owner: bytes = b""
    """`Engine.root` of the prompt's salt and adapter, whose quotas the chunk takes; empty: it takes none."""
    checksum: int | None = None
    """Checksum of its bytes, as `Copier.gather` returns it; None: `commit` computes it."""

    @classmethod
    def chain(
        cls,
        keys: Sequence[ChunkKey],
        extents: Iterable[Extent],
        *,
        parent: bytes = b"",
        owner: bytes = b"",
        checksums: Iterable[int] = (),
    ) -> list[Self]:
        """Consecutive full chunks, as many as there are extents; `parent` is the key of the chunk before the first."""
        chunks = list(zip(keys, extents, strict=False))
        parents = [parent, *keys]
        return [
            cls(key=key, extent=extent, parent=before, owner=owner, checksum=total)
            for (key, extent), before, total in zip(chunks, parents, _or_none(checksums, len(chunks)), strict=False)
        ]


def _or_none(checksums: Iterable[int], count: int) -> list[int | None]:
    return [total for total, _ in zip_longest(checksums, range(count))]


class Copier:
    """Copies chunks between pages and extents. Several threads may copy at once, also with the same copier.

    Made by `Engine.register`. The memory of the pages must stay where it is as long as the copier is used.
    """

    def __init__(self, spec: KvSpec, pages: Sequence[Pages], threads: int) -> None:
        """Raises `ValueError` if the pages are not in host memory, or do not make up the bytes of the spec's chunks."""
        if not pages:
            raise ValueError("pages is empty")
        for index, one in enumerate(pages):
            if one.device != "cpu":
                raise ValueError(f"pages[{index}] are on {one.device}; a copier needs pages in host memory")
            if (size_bytes := one.extent_bytes(spec.chunk_size)) != spec.chunk_bytes:
                raise ValueError(
                    f"a chunk of pages[{index}] has {size_bytes} bytes, and the spec says {spec.chunk_bytes}: layers, "
                    "heads, head size, element type or chunk size differ"
                )
        total = sum(copied_bytes(one, [_whole_chunk(spec, one)]) for one in pages)
        if total != spec.chunk_bytes:
            raise ValueError(f"the pages have {total} bytes of each chunk, not its {spec.chunk_bytes}")
        self._spec = spec
        self._pages = tuple(pages)
        self._threads = threads

    def gather(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        *,
        token_counts: Sequence[int] = (),
        first_slots: Sequence[int] = (),
    ) -> list[int]:
        """Copies pages into extents and returns their checksums, for `Written`.

        `blocks[i]` are the ids of the blocks that have the tokens of chunk i, in order; `first_slots[i]` is the index
        of its first token in the first of them (by default 0), and `token_counts[i]` the number of its tokens (by
        default a full chunk). Raises `ValueError` if a copy does not fit the pages, or the lengths of the lists differ.
        """
        copies = self._copies(extents, blocks, token_counts, first_slots)
        totals = [0] * len(extents)
        for pool, indices in _by_pool(extents):
            own = [copies[index] for index in indices]
            for pages in self._pages:
                for index, part in zip(indices, gather(pages, pool, own, threads=self._threads), strict=True):
                    totals[index] = (totals[index] + part) & 0xFFFF_FFFF_FFFF_FFFF
        return totals

    def scatter(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        *,
        token_counts: Sequence[int] = (),
        first_slots: Sequence[int] = (),
    ) -> None:
        """Copies extents into pages; arguments and errors as for `gather`. The extents have the default counts."""
        copies = self._copies(extents, blocks, token_counts or [one.token_count for one in extents], first_slots)
        for pool, indices in _by_pool(extents):
            own = [copies[index] for index in indices]
            for pages in self._pages:
                scatter(pages, pool, own, threads=self._threads)

    def _copies(
        self,
        extents: Sequence[Extent],
        blocks: Sequence[Sequence[int]],
        token_counts: Sequence[int],
        first_slots: Sequence[int],
    ) -> list[ChunkCopy]:
        counts = token_counts or [self._spec.chunk_size] * len(extents)
        slots = first_slots or [0] * len(extents)
        return [
            ChunkCopy(
                offset=extent.offset, extent_tokens=count, token_count=count, block_ids=block_ids, first_slot=slot
            )
            for extent, block_ids, count, slot in zip(extents, blocks, counts, slots, strict=True)
        ]


def _whole_chunk(spec: KvSpec, pages: Pages) -> ChunkCopy:
    block_count = -(-spec.chunk_size // pages.block_tokens)
    return ChunkCopy(offset=0, extent_tokens=spec.chunk_size, token_count=spec.chunk_size, block_ids=range(block_count))


def _by_pool(extents: Sequence[Extent]) -> Iterator[tuple[memoryview, list[int]]]:
    """Indices of the extents of each pool: those of a lost node may be among them."""
    pools = {id(extent.pool): extent.pool for extent in extents}
    for number, pool in pools.items():
        yield pool.memory, [index for index, extent in enumerate(extents) if id(extent.pool) == number]
