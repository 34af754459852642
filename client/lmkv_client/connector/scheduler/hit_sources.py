"""Where the chunks of a prompt were when it was looked up: loads are counted, logged and traced by it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv.tiers import DISK, HANDOFF, OWN, PEERS, REMOTE, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class HitSources:
    """The chunks of one prompt that were found: those in the node's own pool, then a run for each tier behind it.

    chunk   0     1     2      3       4       5        6
          │ own │ own │ disk │ peers │ peers │ remote │ missing
    """

    own: int = 0
    runs: tuple[Run, ...] = ()

    @property
    def absent_count(self) -> int:
        """Chunks that must be brought into the pool before they can be loaded."""
        return sum(run.chunk_count for run in self.runs)

    def tokens(self, start: int, end: int, chunk_size: int) -> dict[str, int]:
        """Number of the prompt's tokens `[start, end)` in the own pool and in each tier, by name."""
        found: dict[str, int] = {}
        low = stop = 0
        for run in (Run(tier=OWN, chunk_count=self.own), *self.runs):
            low, stop = stop, stop + run.chunk_count * chunk_size
            found[run.tier] = found.get(run.tier, 0) + max(0, min(end, stop) - max(start, low))
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
