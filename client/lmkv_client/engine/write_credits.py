"""Write credits: extents granted ahead, so that a step can name where its chunks go without asking. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

KEPT_WHEN_IDLE = 4
"""Most credits for each part that an idle engine keeps, for the first chunks of its next prompts."""
KEPT_SHARE = 8
"""It keeps at most 1/8 of its limit, or one: in a small pool, credits take the place of chunks."""


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

    @property
    def room(self) -> int:
        """The number that may be requested within the limit."""
        return self.limit - len(self._offsets) - self.requested_count - self.writing_count

    def request(self, wanted_count: int) -> int:
        """The number to request so that `wanted_count` become available; they count as requested."""
        count = max(0, min(wanted_count - len(self._offsets) - self.requested_count, self.room))
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

    def take_surplus(self, wanted_count: int = 0) -> list[int]:
        """Removes and returns the credits that an idle engine returns to its node; `wanted_count` it will need."""
        kept_count = max(self.kept_count, wanted_count)
        extra = self._offsets[kept_count:]
        del self._offsets[kept_count:]
        return extra


class PartCredits:
    """The write credits of one engine: for each part of its chunks, and for each length of partial chunks.

    Credits for partial chunks are requested one by one, when their length is known, and returned if they are not used.
    """

    def __init__(self, part_count: int, limit: int = 0, *, kept_when_idle: int = KEPT_WHEN_IDLE) -> None:
        """`limit` holds for each part, and for each length of partial chunks. `kept_when_idle`: most credits for each
        part that an idle engine keeps."""
        kept_count = min(kept_when_idle, max(1, limit // KEPT_SHARE))
        self._limit = limit
        self._parts = [WriteCredits(limit=limit, kept_count=kept_count) for _ in range(part_count)]
        self._partial: dict[tuple[int, int], WriteCredits] = {}
        """The key is the number of tokens and the part."""

    def __getitem__(self, part: int) -> WriteCredits:
        return self._parts[part]

    @property
    def has_partial(self) -> bool:
        """Whether a credit for a partial chunk is available."""
        return any(map(len, self._partial.values()))

    def partial(self, token_count: int, part: int = 0) -> WriteCredits:
        """The credits for one part of partial chunks of `token_count` tokens."""
        return self._partial.setdefault((token_count, part), WriteCredits(limit=self._limit, kept_count=0))

    def request_partial(self, token_count: int) -> bool:
        """Whether to request one more partial chunk of `token_count` tokens than there are; it counts as requested.

        The request is for all parts or for none: the node answers it for all.
        """
        kinds = [self.partial(token_count, part) for part in range(len(self._parts))]
        if any(kind.room <= 0 for kind in kinds):
            return False
        for kind in kinds:
            kind.requested_count += 1
        return True

    def request(self, wanted_counts: Sequence[int]) -> list[int]:
        """The numbers to request so that as many as wanted become available, by part."""
        return [part.request(wanted) for part, wanted in zip(self._parts, wanted_counts, strict=True)]

    def settle(self, counts: Sequence[int], granted: Iterable[tuple[int, int]]) -> None:
        """Records the node's answer to requested credits, by part; `granted` has the part and offset of each."""
        for part, count in zip(self._parts, counts, strict=False):
            part.settle(count, ())
        for number, offset in granted:
            if 0 <= number < len(self._parts):
                self._parts[number].settle(0, (offset,))

    def settle_partial(self, token_counts: Iterable[int], granted: Iterable[tuple[int, int, int]]) -> None:
        """Records the node's answer to requests for partial chunks; `granted` has the tokens, part and offset of
        each."""
        for token_count in token_counts:
            for part in range(len(self._parts)):
                self.partial(token_count, part).settle(1, ())
        for token_count, part, offset in granted:
            if 0 <= part < len(self._parts):
                self.partial(token_count, part).settle(0, (offset,))

    def take_unused(self, wanted_counts: Mapping[int, int]) -> list[int]:
        """Removes and returns the credits for partial chunks beyond those wanted, by number of tokens."""
        return [
            offset
            for (token_count, _), kind in self._partial.items()
            if len(kind)
            for offset in kind.take_surplus(wanted_counts.get(token_count, 0))
        ]

    def take_surplus(self, wanted_count: int = 0) -> list[int]:
        """Removes and returns the credits for full chunks that an idle engine returns to its node; it will need
        `wanted_count` of those for part 0."""
        wanted_counts = [wanted_count, *[0] * (len(self._parts) - 1)]
        pairs = zip(self._parts, wanted_counts, strict=True)
        return [offset for kind, wanted in pairs for offset in kind.take_surplus(wanted)]
