"""The contract of a backend: one folder, or one store, that a secondary tier keeps chunks in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.health import BackendHealth


class WriteResult(Enum):
    """What became of a chunk that was to be written."""

    WRITTEN = "written"
    PRESENT = "present"
    """The backend held it already."""
    SKIPPED = "skipped"
    """There was no room, or the backend failed or refused it."""
    UNWANTED = "unwanted"
    """It was dropped meanwhile, and removed from the backend again."""


class ListedChunk(Protocol):
    """A chunk as a backend knows it without reading it."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that reading it writes to."""

    @property
    def prefix_digests(self) -> bytes:
        """As `host.Chunk`; empty if the backend does not know them."""


class ChunkHeader(Protocol):
    """A chunk that was read, as the backend describes it."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def parent(self) -> ChunkKey | None: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def token_count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...


C = TypeVar("C", bound=ListedChunk)


class Backend(Protocol[C]):
    """One folder or store. A failed call marks its health closed; none raises but for cancellation."""

    @property
    def health(self) -> BackendHealth: ...

    @property
    def usable(self) -> bool:
        """Whether chunks can be found and read now."""

    @property
    def writable(self) -> bool:
        """Whether chunks can be written now."""

    def has_room(self, size_bytes: int, /) -> bool:
        """Whether a chunk is known to fit without an eviction."""

    def find(self, key: ChunkKey) -> C | None:
        """The chunk, if the backend is known to hold it. Does not count as a use."""

    def holds(self, chunk: C) -> bool:
        """Whether the chunk that `find` returned has not been dropped or replaced since."""

    async def read(self, chunk: C, memory: memoryview, is_intact: Callable[[Any], bool]) -> ChunkHeader | None:
        """Reads a chunk; None if it is absent, incomplete, or not what `is_intact`, called on a thread, accepts.

        The memory is written to until this returns, and, if it is cancelled, longer.
        """

    async def write(self, chunk: Chunk, memory: memoryview, is_wanted: Callable[[], bool]) -> WriteResult:
        """Writes a chunk of the host tier; removes it again unless it `is_wanted` when it is written.

        `memory` has the chunk's bytes, padded to whole pages. It is read until this returns, or longer if cancelled.
        """

    def discard(self, chunks: Sequence[C], reason: MissReason, /) -> None:
        """Forgets chunks that are damaged or gone, and removes what is left of them in the background."""

    async def aclose(self) -> None:
        """Ends running calls within a bounded time, and releases the folder or store. Idempotent."""
