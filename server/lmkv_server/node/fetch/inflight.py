"""What a fetch keeps book of: chunks still missing, those under way, and extents being written. Pure; for `Fetch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmkv.errors import BadMessage
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk, HostTier, Reserved
from lmkv_server.node.tiers.progress import Progress

Offer = tuple[int, int, chunk_pb2.Extent]
"""Index among the keys that were asked for, address in the peer's memory, and extent of a chunk that a peer grants."""


class InflightFetches:
    """Which chunks some fetch is bringing, and which other fetches wait for them: nothing is brought twice."""

    def __init__(self) -> None:
        self._waiting: dict[ChunkKey, list[tuple[Progress, int]]] = {}
        self._bringing: dict[ChunkKey, Progress | None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting

    def start(self, keys: Iterable[ChunkKey], progress: Progress | None = None) -> None:
        """Somebody begins to bring these for that fetch, and will `land` or `end` each."""
        for key in keys:
            assert key not in self._waiting, "brought twice"
            self._waiting[key] = []
            self._bringing[key] = progress

    def join(self, progress: Progress) -> bool:
        """Has the fetch told of what other fetches bring that it misses; whether that is anything."""
        joined = False
        for index in progress.missing:
            key = progress.keys[index]
            waiting = self._waiting.get(key)
            if waiting is not None and self._bringing[key] is not progress:
                joined = True
                if (progress, index) not in waiting:
                    waiting.append((progress, index))
        return joined

    def land(self, chunk: Chunk, instance_id: str) -> None:
        """The chunk came from a peer and is in the tier: those who wait get it."""
        self._bringing.pop(chunk.key, None)
        for progress, index in self._waiting.pop(chunk.key, ()):
            progress.add([(index, chunk)], instance_id)
            progress.changed.set()

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """Those that did not land will not be brought: those who wait must see for themselves."""
        for key in keys:
            self._bringing.pop(key, None)
            for progress, _ in self._waiting.pop(key, ()):
                progress.changed.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A chunk that a peer offers, and where it shall go."""

    index: int
    remote_address: int
    checksum: int
    token_count: int
    size_bytes: int
    reserved: Reserved


class PendingWrites:
    """The extents that one batch is written into. What is not committed is given back, once nobody writes there."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._sizes: dict[int, int] = {}  # by offset
        self._writing = False
        self._closed = False

    @property
    def quarantined(self) -> bool:
        """Whether extents are kept only because a transfer has not stopped."""
        return self._closed and self._writing

    @property
    def size_bytes(self) -> int:
        """Bytes of the extents that were neither committed nor given back."""
        return sum(self._sizes.values())

    def reserve(self, size_bytes: int) -> Reserved | None:
        """An extent to write into; None if there is no room."""
        reserved = self._tier.reserve(size_bytes)
        if reserved:
            self.adopt(reserved)
        return reserved

    def adopt(self, reserved: Reserved) -> None:
        """Takes over an extent that was reserved already."""
        self._sizes[reserved.offset] = reserved.size_bytes

    def write(self) -> Callable[[], None]:
        """A transfer begins; the result is to be called when it has stopped."""
        self._writing = True
        return self._stopped

    def commit(self, keys: Sequence[ChunkKey], fingerprint: bytes, incoming: Incoming) -> Chunk | None:
        """Makes a chunk visible that has arrived whole; the one that is there if somebody else was faster.

        `keys` are those of the prompt that it is a part of.
        """
        key = keys[incoming.index]
        self._sizes.pop(incoming.reserved.offset, None)
        chunk = self._tier.commit(
            incoming.reserved.offset,
            key=key,
            fingerprint=fingerprint,
            size_bytes=incoming.size_bytes,
            checksum=incoming.checksum,
            token_count=incoming.token_count,
            parent=keys[incoming.index - 1] if incoming.index else None,
        )
        return chunk or self._tier.get(key)

    def close(self) -> None:
        """Gives back what was not committed, now or when the transfer has stopped."""
        self._closed = True
        if not self._writing:
            self._give_back()

    def _stopped(self) -> None:
        self._writing = False
        if self._closed:
            self._give_back()

    def _give_back(self) -> None:
        for offset in self._sizes:
            self._tier.give_back(offset)
        self._sizes.clear()


def checked_extents(
    response: pb.AcquireResponse, key_count: int, spec: KvSpec, regions: Sequence[pb.Region]
) -> list[Offer]:
    """What a peer grants. Raises `BadMessage` if that makes no sense."""
    extents = response.grant.extents
    if len(extents) != len(response.present) or list(response.present) != sorted(set(response.present)):
        raise BadMessage("a peer's grant does not match the keys it was asked for")
    found = []
    for index, extent in zip(response.present, extents, strict=True):
        if not (
            0 <= index < key_count
            and 0 <= extent.region < len(regions)
            and 0 < extent.token_count <= spec.chunk_size
            and extent.size_bytes == spec.size_bytes(extent.token_count)
            and 0 <= extent.offset <= regions[extent.region].size_bytes - extent.size_bytes
        ):
            raise BadMessage(f"a peer offers an extent that cannot be: {extent}")
        found.append((index, regions[extent.region].address + extent.offset, extent))
    return found
