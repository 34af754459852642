"""Write credits: extents granted ahead, so that a step can name where its chunks go without asking. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

KEPT_WHEN_IDLE = 4
"""Most credits for each part that an idle engine keeps, for the first chunks of its next prompts."""
KEPT_SHARE = 8
"""It keeps at most 1/8 of its limit, and at least one: in a small pool, credits take the place of chunks."""
PARTIAL_SIZES = (1, 2, 3)
"""Quarters of a full chunk that credits for partial chunks are for."""


@dataclass(kw_only=True, slots=True)
class WriteCredits:
    """Credits of one kind. `limit` bounds those available, requested and being written together."""

    limit: int = 0
    kept_count: int = KEPT_WHEN_IDLE
    """Credits that an idle engine keeps."""
    requested_count: int = 0
    writing_count: int = 0
    _offsets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._offsets)

    def request(self, wanted_count: int) -> int:
        """The number to request so that `wanted_count` become available; they count as requested."""
        room = self.limit - len(self._offsets) - self.requested_count - self.writing_count
        count = max(0, min(wanted_count - len(self._offsets) - self.requested_count, room))
        self.requested_count += count
        return count

    def settle(self, count: int, granted: Iterable[int]) -> None:
        """Records the node's answer to `count` requested credits, and the offsets that it granted."""
        self.requested_count -= count
        self._offsets.extend(granted)

    def take(self) -> int | None:
        """Takes a credit: the offset of an extent to write into; None if none is available."""
        if not self._offsets:
            return None
        self.writing_count += 1
        return self._offsets.pop()

    def commit(self) -> None:
        """Records that a taken credit was committed."""
        self.writing_count -= 1

    def return_unwritten(self, offset: int) -> None:
        """Makes a taken credit available again that was not written."""
        self.writing_count -= 1
        self._offsets.append(offset)

    def take_surplus(self) -> list[int]:
        """Removes and returns the credits that an idle engine returns to its node."""
        extra = self._offsets[self.kept_count :]
        del self._offsets[self.kept_count :]
        return extra


class PartCredits:
    """The write credits of one engine: for each part of its chunks, and for each size of partial chunks."""

    def __init__(self, part_count: int, limit: int = 0) -> None:
        """`limit` holds for each part, and a quarter of it for each size of partial chunks."""
        kept_count = max(1, min(KEPT_WHEN_IDLE, limit // KEPT_SHARE))
        self._parts = [WriteCredits(limit=limit, kept_count=kept_count) for _ in range(part_count)]
        self._partial = {
            quarters: WriteCredits(limit=max(1, limit // 4) if limit else 0, kept_count=1) for quarters in PARTIAL_SIZES
        }

    def __getitem__(self, part: int) -> WriteCredits:
        return self._parts[part]

    def request(self, wanted_counts: Sequence[int]) -> list[int]:
        """The numbers to request so that as many as wanted become available, by part."""
        return [part.request(wanted) for part, wanted in zip(self._parts, wanted_counts, strict=True)]

    def for_partial(self, quarters: int) -> WriteCredits:
        """The credits that a partial chunk of as many quarters takes from: of the smallest size that has one."""
        sizes = (self._partial[size] for size in PARTIAL_SIZES if size >= quarters)
        return next(filter(len, sizes), self._parts[0])

    def request_partial(self, running_count: int) -> list[int]:
        """The sizes, in quarters, of partial chunks for which to request credits: some for requests that run."""
        wanted = -(-running_count // len(PARTIAL_SIZES))
        return [size for size, kind in self._partial.items() for _ in range(kind.request(wanted))]

    def settle_partial(self, sizes: Iterable[int], granted: Iterable[tuple[int, int]]) -> None:
        """Records the node's answer to requests for partial chunks; `granted` has the quarters and offset of each."""
        for size in sizes:
            if size in self._partial:
                self._partial[size].settle(1, ())
        for size, offset in granted:
            if size in self._partial:
                self._partial[size].settle(0, (offset,))

    def settle(self, counts: Sequence[int], granted: Iterable[tuple[int, int]]) -> None:
        """Records the node's answer to requested credits, by part; `granted` has the part and offset of each."""
        for part, count in zip(self._parts, counts, strict=False):
            part.settle(count, ())
        for number, offset in granted:
            if 0 <= number < len(self._parts):
                self._parts[number].settle(0, (offset,))

    def take_surplus(self) -> list[int]:
        """Removes and returns the credits that an idle engine returns to its node."""
        kinds = (*self._parts, *self._partial.values())
        return [offset for kind in kinds for offset in kind.take_surplus()]
