"""What a lookup has found: a hit of a prompt, and where its items are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    sources: bytes = b""
    """Where each item of the hit is: 0 in the pool, and n in the nth tier of `answers`."""
    answers: Mapping[str, Presence] = field(default_factory=dict)
    """By the tier's name, in the order in which they were asked, in terms of all items of the prompt."""
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
        answers = (self.answers.get(run.tier) for run in self.runs)
        return next((answer.source for answer in answers if answer and answer.source), "")

    def presence(self, tier: str) -> Presence | None:
        """The answer of a tier in terms of the items of the hit; None if it was not asked."""
        if tier not in self.answers:
            return None
        number = 1 + list(self.answers).index(tier)
        return replace(
            self.answers[tier],
            asked=[at for at, source in enumerate(self.sources) if source >= number],
            indices=[at for at, source in enumerate(self.sources) if source == number],
        )
