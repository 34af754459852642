"""What a lookup found behind host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmkv.tiers import Run
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.cache.prompt_items import PromptItems
from lmkv_server.node.tiers.base import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Consecutive runs behind those that the pool has, and what each tier that was asked said."""

    runs: tuple[Run, ...] = ()
    presences: Mapping[str, Presence] = field(default_factory=dict)
    """By the tier's name."""
    items: PromptItems | None = None
    """The items of the hit, which runs and presences then mean; None if its chunks have one part."""

    @property
    def chunk_count(self) -> int:
        """Chunks of all runs."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def source(self) -> str:
        """The first other instance that holds a run; empty if none does."""
        presences = (self.presences.get(run.tier) for run in self.runs)
        return next((presence.source for presence in presences if presence and presence.source), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemHit:
    """The longest hit of a prompt whose chunks have several parts."""

    chunk_count: int = 0
    """Chunks of the hit."""
    own: Sequence[Chunk] = ()
    """Its first items in the pool without a gap."""
    behind: Sequence[Chunk] = ()
    """Its other items in the pool."""
    rest: Hit = field(default_factory=Hit)
    """Its items behind `own`; runs in the pool have the tier `own`."""
    refused_count: int = 0
    """Chunks by which the hit is shorter because fetching them would take longer than computing them."""
