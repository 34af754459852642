"""What a lookup has found: a hit of a prompt, and where its items are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lmkv.prompt import NO_HIT, Hit, Items, Prompt
from lmkv.tiers import Run
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.base import Presence


@dataclass(kw_only=True)
class Found:
    """The longest hit of a prompt that was found, and what each tier that was asked has of its items."""

    prompt: Prompt
    hit: Hit = NO_HIT
    own: Sequence[Chunk] = ()
    """Its first items in the pool without a gap."""
    behind: Sequence[Chunk] = ()
    """Its other items in the pool."""
    runs: tuple[Run, ...] = ()
    """Its items behind `own`; runs in the pool have the tier `own`."""
    presences: Mapping[str, Presence] = field(default_factory=dict)
    """By the tier's name, in terms of the items of the hit."""
    refused: tuple[Run, ...] = ()
    """Chunks by which the hit is shorter because bringing them would take longer than computing them."""
    unanswered: Sequence[str] = ()
    """Tiers that were asked and did not answer."""
    limited_count: int = 0
    """Chunks by which the hit is shorter because a longer one has more bytes than may be held."""

    @cached_property
    def items(self) -> Items:
        """The items of the hit."""
        return self.prompt.items(self.hit)

    @property
    def chunk_count(self) -> int:
        """Chunks of the hit, its tail included."""
        return self.hit.chunk_count + (self.hit.tail is not None)

    @property
    def absent_count(self) -> int:
        """Items of all runs."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def source(self) -> str:
        """The first other instance that holds a run; empty if none does."""
        presences = (self.presences.get(run.tier) for run in self.runs)
        return next((presence.source for presence in presences if presence and presence.source), "")
