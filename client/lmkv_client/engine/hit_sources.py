"""Keeps the tiers that had the chunks of a prompt at its lookup: loads are counted, logged and traced by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmkv.tiers import DISK, HANDOFF, OWN, PEERS, REMOTE, Run
from lmkv.v1 import engine_service_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class HitSources:
    """The chunks of one prompt that were found: those in the node's own pool, then a run for each tier behind it.

    chunk   0     1     2      3       4       5        6
          │ own │ own │ disk │ peers │ peers │ remote │ missing

    If items of the hit are not its chunks, they are counted instead: `tokens` divides the tokens of the hit evenly.
    """

    own: int = 0
    runs: tuple[Run, ...] = ()
    hit_chunk_count: int = 0
    """Chunks of the hit, if items are counted; else 0."""

    @classmethod
    def of_answer(cls, found: pb.FoundChunks) -> HitSources:
        """Reads the sources from the node's answer to a lookup."""
        runs = tuple(Run(tier=run.tier, chunk_count=run.chunk_count) for run in found.runs)
        sources = cls(own=len(found.own), runs=runs)
        return (
            sources
            if found.hit_chunk_count in (0, sources.item_count)
            else replace(sources, hit_chunk_count=found.hit_chunk_count)
        )

    @property
    def absent_count(self) -> int:
        """Chunks that must be brought into the pool before they can be loaded."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def item_count(self) -> int:
        """Items of the hit."""
        return self.own + self.absent_count

    @property
    def chunk_count(self) -> int:
        """Chunks of the hit."""
        return self.hit_chunk_count or self.item_count

    def tier_at(self, position: int, chunk_size: int) -> str:
        """The tier of one token; empty if it was not found."""
        found = self.tokens(position, position + 1, chunk_size)
        return next((tier for tier, count in found.items() if count), "")

    def tokens(self, start: int, end: int, chunk_size: int) -> dict[str, int]:
        """Number of the prompt's tokens `[start, end)` in the own pool and in each tier, by name."""
        if self.hit_chunk_count:
            return self._divided(max(0, min(end, self.hit_chunk_count * chunk_size) - start))
        found: dict[str, int] = {}
        low = stop = 0
        for run in (Run(tier=OWN, chunk_count=self.own), *self.runs):
            low, stop = stop, stop + run.chunk_count * chunk_size
            found[run.tier] = found.get(run.tier, 0) + max(0, min(end, stop) - max(start, low))
        return found

    def _divided(self, token_count: int) -> dict[str, int]:
        """The tokens of the hit by tier, in proportion to the items there."""
        counts: dict[str, int] = {OWN: 0}
        for run in (Run(tier=OWN, chunk_count=self.own), *self.runs):
            counts[run.tier] = counts.get(run.tier, 0) + run.chunk_count
        total = sum(counts.values())
        found = {tier: token_count * count // total for tier, count in counts.items()}
        most = max(counts, key=lambda tier: counts[tier])
        found[most] += token_count - sum(found.values())
        return found


def describe(tokens: dict[str, int], peer_id: str) -> str:
    """The places that have any tokens, for the log: `own pool and peer n2`."""
    names = {
        OWN: "own pool",
        DISK: "disk",
        PEERS: f"peer {peer_id}" if peer_id else "a peer",
        REMOTE: "the shared store",
        HANDOFF: f"a handoff by {peer_id}" if peer_id else "a handoff",
    }
    return " and ".join(names.get(tier, f"tier {tier}") for tier, count in tokens.items() if count)
