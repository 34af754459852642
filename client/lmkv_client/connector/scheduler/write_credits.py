"""Write credits: extents granted ahead, so that a step can name where its chunks go without asking. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

KEPT_WHEN_IDLE = 4
"""Credits that an idle engine keeps, for the first chunks of its next prompts."""


@dataclass(kw_only=True, slots=True)
class WriteCredits:
    """What one engine may write into. `limit` bounds those in hand, asked for, and being written together."""

    limit: int = 0
    requested_count: int = 0
    writing_count: int = 0
    _offsets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._offsets)

    def request(self, wanted_count: int) -> int:
        """How many more to ask for, so that in the end `wanted_count` are in hand; they count as asked for."""
        room = self.limit - len(self._offsets) - self.requested_count - self.writing_count
        count = max(0, min(wanted_count - len(self._offsets) - self.requested_count, room))
        self.requested_count += count
        return count

    def settle(self, count: int, granted: list[int]) -> None:
        """The node has answered for so many that were asked for, and granted these."""
        self.requested_count -= count
        self._offsets.extend(granted)

    def take(self) -> int | None:
        """Offset of an extent to write into now; None if none is in hand."""
        if not self._offsets:
            return None
        self.writing_count += 1
        return self._offsets.pop()

    def commit(self) -> None:
        """One that was taken is committed: it is the node's again."""
        self.writing_count -= 1

    def return_unwritten(self, offset: int) -> None:
        """One that was taken was not written."""
        self.writing_count -= 1
        self._offsets.append(offset)

    def take_surplus(self) -> list[int]:
        """What an idle engine should give back; no longer in hand."""
        extra = self._offsets[KEPT_WHEN_IDLE:]
        del self._offsets[KEPT_WHEN_IDLE:]
        return extra
