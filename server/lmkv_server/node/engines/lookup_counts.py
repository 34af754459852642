"""Statistics of engine lookups: counted by `EngineStream`, read by metrics and by reports to the fleet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LookupCounts:
    """Lookups of engines since the start of the node, and what came of them."""

    count: int = 0
    asked_chunks: int = 0
    own_chunks: int = 0
    """Chunks that the node held in memory."""
    disk_chunks: int = 0
    """Chunks after those that it held on disk."""
    peer_chunks: int = 0
    """Chunks after those that one peer held, and were offered."""
    remote_chunks: int = 0
    """Chunks after those that were in the store which all share."""
    refused_slower: int = 0
    """Lookups after which nothing of peers was offered, for to compute it is quicker."""

    def note(self, *, asked: int, own: int, peer: int, disk: int = 0, remote: int = 0) -> None:
        """Counts one."""
        self.count += 1
        self.asked_chunks += asked
        self.own_chunks += own
        self.disk_chunks += disk
        self.peer_chunks += peer
        self.remote_chunks += remote
