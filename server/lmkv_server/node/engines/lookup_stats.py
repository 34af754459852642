"""Statistics of all engines' lookups. Counted by the `Attach` streams, read by metrics and heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lmkv.tiers import HANDOFF, HIT_TIERS, OWN, PEERS, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupStats:
    """Lookups of engines since the start of the node, and what they found."""

    count: int
    asked_chunks: int
    found_chunks: Mapping[str, int]
    """Chunks that were found and offered, by tier; `own` are those in the node's memory."""
    refused_slower: int
    """Lookups after which chunks were not offered, because computing them is quicker."""
    load_count: int
    """Loads for which the engine reported both of the following."""
    load_seconds: float
    """Time that the requests of these loads waited for lookup and load."""
    avoided_prefill_seconds: float
    """Time that computing the loaded tokens would have taken."""

    @property
    def peer_chunks(self) -> int:
        """Chunks that other nodes held."""
        return self.found_chunks[PEERS] + self.found_chunks[HANDOFF]

    @property
    def own_chunks(self) -> int:
        """All other chunks that were found; those in a shared store count as the node's own."""
        return sum(self.found_chunks.values()) - self.peer_chunks


class LookupCounters:
    """Counts the lookups of engines."""

    def __init__(self) -> None:
        self._count = 0
        self._asked_chunks = 0
        self._found_chunks = dict.fromkeys(HIT_TIERS, 0)
        self._refused_slower = 0
        self._load_count = 0
        self._load_seconds = 0.0
        self._avoided_prefill_seconds = 0.0

    def add(self, *, asked_count: int, own_count: int, runs: Iterable[Run], refused: bool = False) -> None:
        """Counts one lookup; `refused`: chunks were not offered, because computing them is quicker."""
        self._count += 1
        self._asked_chunks += asked_count
        self._found_chunks[OWN] += own_count
        for run in runs:
            self._found_chunks[run.tier] = self._found_chunks.get(run.tier, 0) + run.chunk_count
        self._refused_slower += refused

    def add_load(self, *, load_seconds: float, avoided_prefill_seconds: float) -> None:
        """Counts a load whose engine knows how long computing its tokens would have taken."""
        self._load_count += 1
        self._load_seconds += load_seconds
        self._avoided_prefill_seconds += avoided_prefill_seconds

    def stats(self) -> LookupStats:
        """The counts as they are now."""
        return LookupStats(
            count=self._count,
            asked_chunks=self._asked_chunks,
            found_chunks=dict(self._found_chunks),
            refused_slower=self._refused_slower,
            load_count=self._load_count,
            load_seconds=self._load_seconds,
            avoided_prefill_seconds=self._avoided_prefill_seconds,
        )
