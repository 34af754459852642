"""What a lookup found behind host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey
from lmkv.tiers import OWN, Run
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.cache.prompt_items import PromptItems
from lmkv_server.node.tiers.base import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """A chunk behind the full chunks of a hit that begins with the prompt's next tokens."""

    tier: str
    """The name of the tier that has it; `own` for the pool."""
    key: ChunkKey
    token_count: int
    """The prompt's tokens that it begins with."""
    stored_token_count: int
    """All of its tokens."""
    chunk: Chunk | None = None
    """The chunk, if the pool has it. It is not held."""
    presence: Presence = field(default_factory=Presence)
    """What the tier has answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """Consecutive runs behind those that the pool has, and what each tier that was asked said."""

    runs: tuple[Run, ...] = ()
    presences: Mapping[str, Presence] = field(default_factory=dict)
    """By the tier's name."""
    items: PromptItems | None = None
    """The items of the hit, which runs and presences then mean; None if its chunks have one part."""

    def cut(self, end: int) -> Hit:
        """This hit, with nothing known of chunks from `end` on, which none of its runs has."""
        return Hit(runs=self.runs, presences={name: one.cut(end) for name, one in self.presences.items()})

    def with_tail(self, index: int, tail: Tail) -> Hit:
        """This hit, which ends before chunk `index`, and the tail as its last chunk."""
        cut = self.cut(index)
        runs, presences = cut.runs, dict(cut.presences)
        last = runs[-1] if runs else Run(tier="", chunk_count=0)
        if last.tier == tail.tier:
            runs = (*runs[:-1], Run(tier=last.tier, chunk_count=last.chunk_count + 1))
        else:
            runs = (*runs, Run(tier=tail.tier, chunk_count=1))
        if tail.tier != OWN:
            presences[tail.tier] = presences.get(tail.tier, Presence()).with_tail(index, tail.presence)
        return Hit(runs=runs, presences=presences)

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
    unanswered: Sequence[str] = ()
    """Tiers that were asked and did not answer."""
