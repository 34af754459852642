"""Where the chunks of a prompt were when it was looked up: what loads are counted, logged and traced by. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HitSource(Enum):
    """Where a chunk can be, quickest first; the values are the words of counters and spans."""

    OWN = "own"
    """The node's own pool."""
    DISK = "disk"
    """The node's own disk."""
    PEER = "peer"
    """The memory of other nodes, or their disks."""
    REMOTE = "remote"
    """The store that all share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HitSources:
    """The chunks of one prompt that were found: so many in each place, one place after the other.

    chunk   0     1     2      3      4      5        6
          │ own │ own │ disk │ peer │ peer │ remote │ nowhere
    """

    own: int = 0
    disk: int = 0
    peer: int = 0
    remote: int = 0

    @property
    def absent_count(self) -> int:
        """Chunks that must be brought into the pool before they can be loaded."""
        return self.disk + self.peer + self.remote

    def tokens(self, start: int, end: int, chunk_size: int) -> dict[HitSource, int]:
        """How many of the prompt's tokens `[start, end)` are in each place."""
        found = {}
        low = stop = 0
        for place, count in zip(HitSource, (self.own, self.disk, self.peer, self.remote), strict=True):
            low, stop = stop, stop + count * chunk_size
            found[place] = max(0, min(end, stop) - max(start, low))
        return found


def describe(tokens: dict[HitSource, int], peer_id: str) -> str:
    """The places that have any tokens, for people: `own pool and peer n2`."""
    names = {
        HitSource.OWN: "own pool",
        HitSource.DISK: "disk",
        HitSource.PEER: f"peer {peer_id}" if peer_id else "a peer",
        HitSource.REMOTE: "the shared store",
    }
    return " and ".join(names[place] for place, count in tokens.items() if count)
