"""The extents that one batch of chunks is written into, and the quarantine of those whose transfer has not stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk, HostTier, Reservation
from lmkv_server.node.peers.extents import PeerChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class IncomingChunk:
    """A chunk in a peer's memory, and the extent that it is read into."""

    remote: PeerChunk
    reserved: Reservation


class PendingWrites:
    """The reserved extents of one batch. Each is committed, or released once no transfer can write to it any more."""

    def __init__(self, tier: HostTier) -> None:
        """`tier` has the extents: the node's tier, or that of a device buffer."""
        self.chunks: list[IncomingChunk] = []
        self._tier = tier
        self._open: dict[int, Reservation] = {}  # by offset: neither committed nor released
        self._is_writing = False
        self._is_closed = False

    @property
    def is_quarantined(self) -> bool:
        """Whether extents stay reserved only because a transfer has not stopped."""
        return self._is_closed and self._is_writing

    @property
    def open_bytes(self) -> int:
        """Bytes of the extents that are neither committed nor released."""
        return sum(reserved.size_bytes for reserved in self._open.values())

    def add(self, remote: PeerChunk, reserved: Reservation) -> IncomingChunk:
        """Takes ownership of an extent that was reserved for this chunk."""
        chunk = IncomingChunk(remote=remote, reserved=reserved)
        self.chunks.append(chunk)
        self._open[reserved.offset] = reserved
        return chunk

    def begin(self) -> Callable[[], None]:
        """Marks the start of a transfer; the caller calls the result when the transfer has stopped."""
        self._is_writing = True
        return self._stopped

    def commit(self, key: ChunkKey, parent: ChunkKey | None, fingerprint: bytes, chunk: IncomingChunk) -> Chunk | None:
        """Makes an intact chunk visible. The chunk of that key in the tier, if another transfer committed it first."""
        remote = chunk.remote
        self._open.pop(chunk.reserved.offset, None)
        committed = self._tier.commit(
            chunk.reserved.offset,
            key=key,
            fingerprint=fingerprint,
            size_bytes=remote.size_bytes,
            checksum=remote.checksum,
            token_count=remote.token_count,
            parent=parent,
            prefix_digests=remote.prefix_digests,
        )
        return committed or self._tier.get(key)

    def close(self) -> None:
        """Releases what was not committed: now, or when the transfer has stopped."""
        self._is_closed = True
        if not self._is_writing:
            self._release()

    def _stopped(self) -> None:
        self._is_writing = False
        if self._is_closed:
            self._release()

    def _release(self) -> None:
        for offset in self._open:
            self._tier.give_back(offset)
        self._open.clear()
