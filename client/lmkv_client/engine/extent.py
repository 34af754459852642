"""Extents: places of chunks in the node's pool, as an engine reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Self

from lmkv.keys import ChunkKey
from lmkv.pool.socket import AttachedPool


class MappedPool:
    """The pool of one attachment. It stays mapped while any extent or view of it exists, also after `retire`."""

    def __init__(self, attached: AttachedPool) -> None:
        self.memory = attached.pool.buffer[:]
        """All of its bytes. A view of its own, which keeps the memory mapped."""
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
    """The pool that it is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A chunk that was written into a reserved extent, to be committed."""

    key: ChunkKey
    extent: Extent
    token_count: int = 0
    """Tokens of the chunk; 0: a full one. A shorter one has no gaps: `[layer][head][part][token_count][head_size]`."""
    parent: bytes = b""
    """Key of the chunk before it, which the node does not evict before this one; empty if there is none."""
    checksum: int | None = None
    """Checksum of its bytes, as `Copier.gather` returns it; None: `commit` computes it."""

    @classmethod
    def chain(
        cls, keys: Sequence[ChunkKey], extents: Iterable[Extent], *, parent: bytes = b"", checksums: Iterable[int] = ()
    ) -> list[Self]:
        """Consecutive full chunks, as many as there are extents; `parent` is the key of the chunk before the first."""
        chunks = list(zip(keys, extents, strict=False))
        parents = [parent, *keys]
        return [
            cls(key=key, extent=extent, parent=before, checksum=total)
            for (key, extent), before, total in zip(chunks, parents, _or_none(checksums, len(chunks)), strict=False)
        ]


def _or_none(checksums: Iterable[int], count: int) -> list[int | None]:
    return [total for total, _ in zip_longest(checksums, range(count))]
