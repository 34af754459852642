"""Pins: chunks that are not evicted before a time. Pure; used by `OrderExecutor` and `OrderRunner`.

pin ──► in force ──┬── unpin  ──► ended        Pins are counted: a chunk stays as long as one of its pins is in force.
  └─again: longer  └── expire ──► ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lmkv.errors import BadMessage, BadSelection, ChunkNotFound, Full, PinNotFound
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.host import Chunk, HostTier

MAX_PINS = 1000
"""Most pins that one node keeps at a time."""
MAX_ENDED = 4096
"""Ids of ended pins that a node remembers, so that ending one again succeeds."""
MAX_ID_BYTES = 320
"""Longest id of a pin: room for that of an instance, and still all pins travel in one message."""
MAX_TTL_SECONDS = 86_400.0
"""Clients renew a pin by repeating the request."""


@dataclass(kw_only=True, slots=True)
class Pin:
    """Some chunks that are kept for a while."""

    pin_id: str
    expire_at: float
    """When it expires, by the clock whose time `pin` was given."""
    chunks: set[Chunk] = field(default_factory=set)
    owner: bytes = b""
    """The owner whose quota it takes; empty for pins of operators, which have no quota."""

    @property
    def kept(self) -> list[Chunk]:
        """The chunks that are still of use: all but those that were found damaged."""
        return [chunk for chunk in self.chunks if not chunk.dropped]


class Pins:
    """All pins that are in force. Every pin on a chunk of the tier is its own, and ended by it."""

    def __init__(self, tier: HostTier) -> None:
        self._revision = 0
        self._tier = tier
        self._pins: dict[str, Pin] = {}
        self._ended: dict[str, None] = {}
        """Ids of the last pins that ended, oldest first."""
        self._owned_counts: Counter[tuple[bytes, Chunk]] = Counter()
        """Pins by their owner, if they have one, and chunk."""
        self._owned_bytes: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    @property
    def revision(self) -> int:
        """Rises with every change."""
        return self._revision

    def get(self, pin_id: str) -> Pin | None:
        """The pin of this id, if it is in force."""
        return self._pins.get(pin_id)

    @property
    def owned_count(self) -> int:
        return sum(bool(pin.owner) for pin in self)

    def is_owned(self, owner: bytes, chunk: Chunk) -> bool:
        """Whether a pin of the owner keeps the chunk."""
        return (owner, chunk) in self._owned_counts

    def owned_bytes(self, owner: bytes | None = None) -> int:
        """Bytes of the chunks that pins of an owner keep, each counted once, or the sum of all owners."""
        return self._owned_bytes.total() if owner is None else self._owned_bytes[owner]

    def pin(self, pin_id: str, keys: Sequence[ChunkKey], now: float, ttl_seconds: float, *, owner: bytes = b"") -> Pin:
        """Keeps the longest prefix of `keys` that is held without a gap, for at most `MAX_TTL_SECONDS`.

        A pin that is in force keeps these chunks besides its own, and lasts at least as long as before. Raises
        `BadMessage` or `BadSelection` if there can be no such pin, `Full` if there are too many, `ChunkNotFound` if
        not even the first chunk is held; then nothing has changed.
        """
        if not 0 < (size := len(pin_id.encode())) <= MAX_ID_BYTES:
            raise BadMessage(f"pin_id has {size} bytes; it must have 1 to {MAX_ID_BYTES}", field="pin_id")
        if ttl_seconds <= 0:
            raise BadSelection(f"ttl is {ttl_seconds:g} s; it must be positive", field="ttl")
        if pin_id not in self._pins and len(self._pins) >= MAX_PINS:
            raise Full(f"{MAX_PINS} pins are in force here, the most there may be; end some", limit=MAX_PINS)
        found = self._tier.find(keys)
        if not found:
            raise ChunkNotFound("not even the first of the chunks to pin is held here")
        pin = self._pins.setdefault(pin_id, Pin(pin_id=pin_id, expire_at=now, owner=owner))
        added = set(found) - pin.chunks
        self._tier.pin(added)
        pin.chunks |= added
        self._own(pin, added)
        pin.expire_at = max(pin.expire_at, now + min(ttl_seconds, MAX_TTL_SECONDS))
        self._revision += 1
        return pin

    def unpin(self, pin_id: str) -> Pin | None:
        """Ends a pin early; None if it has ended. Raises `PinNotFound` if there was none."""
        if pin_id not in self._pins and pin_id not in self._ended:
            raise PinNotFound(f"there is no pin {pin_id!r} here; `lmkv pins` lists those in force", pin_id=pin_id)
        return self._end(pin_id)

    def expire(self, now: float) -> list[Pin]:
        """Ends the pins whose time is up, and returns them."""
        due = [pin for pin in self if pin.expire_at <= now]
        for pin in due:
            self._end(pin.pin_id)
        return due

    def next_expiry(self) -> float | None:
        return min((pin.expire_at for pin in self), default=None)

    def clear(self) -> None:
        """Ends every pin."""
        for pin_id in list(self._pins):
            self._end(pin_id)

    def _end(self, pin_id: str) -> Pin | None:
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._tier.unpin(pin.chunks)
            self._disown(pin)
            self._revision += 1
            self._ended.pop(pin_id, None)
            self._ended[pin_id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        return pin

    def _own(self, pin: Pin, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks if pin.owner else ():
            if not self._owned_counts[pin.owner, chunk]:
                self._owned_bytes[pin.owner] += align(chunk.size_bytes)
            self._owned_counts[pin.owner, chunk] += 1

    def _disown(self, pin: Pin) -> None:
        for chunk in pin.chunks if pin.owner else ():
            self._owned_counts[pin.owner, chunk] -= 1
            if not self._owned_counts[pin.owner, chunk]:
                del self._owned_counts[pin.owner, chunk]
                self._owned_bytes[pin.owner] -= align(chunk.size_bytes)
        if not self._owned_bytes[pin.owner]:
            del self._owned_bytes[pin.owner]

    def check(self) -> None:
        """Asserts that every chunk counts just its pins, and that only damage takes a pinned chunk out of the index."""
        assert len(self._pins) <= MAX_PINS
        assert len(self._ended) <= MAX_ENDED
        counts: dict[Chunk, int] = {}
        for pin_id, pin in self._pins.items():
            assert pin.pin_id == pin_id
            for chunk in pin.chunks:
                counts[chunk] = counts.get(chunk, 0) + 1
        owned = Counter((pin.owner, chunk) for pin in self if pin.owner for chunk in pin.chunks)
        assert owned == self._owned_counts
        sizes: Counter[bytes] = Counter()
        for owner, chunk in owned:
            sizes[owner] += align(chunk.size_bytes)
        assert sizes == self._owned_bytes
        assert all(chunk.pins == count <= chunk.holds for chunk, count in counts.items())
        assert all(chunk.pins == counts.get(chunk, 0) for chunk in self._tier)
        assert all(chunk.dropped or self._tier.get(chunk.key) is chunk for chunk in counts)
