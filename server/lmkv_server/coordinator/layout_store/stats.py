"""Statistics of a shared layout map, for its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMapStats:
    """Counts since the process started."""

    published_count: int = 0
    """Entries that were published."""
    followed_count: int = 0
    """Entries of other coordinators that were applied."""
    load_count: int = 0
    """Instances whose chunks were loaded."""
    loss_count: int = 0
    """Times that the connection to the map was lost."""

    def plus(self, other: SharedMapStats) -> SharedMapStats:
        """The sum of both."""
        return SharedMapStats(
            published_count=self.published_count + other.published_count,
            followed_count=self.followed_count + other.followed_count,
            load_count=self.load_count + other.load_count,
            loss_count=self.loss_count + other.loss_count,
        )
