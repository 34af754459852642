"""The result of a lookup: a hit of a prompt, where its items are, and why the chunks behind it were missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.prompt import NO_HIT, Hit, Items, Prompt
from lmkv.tiers import HOST, OWN, Run
from lmkv_server.node.cache.events import Losses
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.base import Presence, SecondaryTier


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
    """The source of each item of the hit: 0 is the pool, n is the nth tier of `answers`."""
    answers: Mapping[str, Presence] = field(default_factory=dict)
    """Answers by the tier's name, in the order in which they were asked, in terms of all items of the prompt."""
    refused: tuple[Run, ...] = ()
    """Chunks by which the hit is shorter because bringing them would take longer than computing them."""
    unanswered: Sequence[str] = ()
    """Tiers that were asked and did not answer."""
    limited_count: int = 0
    """Chunks by which the hit is shorter because a longer one has more bytes than may be held."""
    prefix_count: int = 0
    """Chunks that it would have if the windows were there that make it shorter; 0 if none do."""

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


REMOVED_EVERYWHERE = (MissReason.CLEARED, MissReason.DROPPED)
"""Reasons that hold for all tiers of this node, whether these can be asked or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissedRun:
    """Consecutive chunks of a prompt that were missed for one reason."""

    chunk_count: int
    reason: MissReason
    tier: str = ""
    """The tier that the first of them left last, or that is down; empty if no tier is concerned."""
    time: float = 0.0
    """The time at which it left that tier, in seconds since 1970; 0 if that is unknown."""


class Diagnosis:
    """Says why chunks are missed. One event loop owns it; it asks no tier and counts as no use."""

    def __init__(self, pool: HostTier, tiers: Sequence[SecondaryTier], losses: Losses) -> None:
        self._pool = pool
        self._tiers = tiers
        self._losses = losses

    def behind(
        self,
        prompt: Prompt,
        end: int,
        *,
        refused: Sequence[Run] = (),
        unanswered: Sequence[str] = (),
        limited_count: int = 0,
    ) -> list[MissedRun]:
        """The missed runs from chunk `end` on, where a hit ends, up to the end of the prompt.

        `refused` are the runs there that are slower to load than to compute, and `unanswered` the tiers that were asked
        and did not answer. `limited_count` are chunks there that were found, and are of more bytes than may be held.
        """
        missed = [MissedRun(chunk_count=run.chunk_count, reason=MissReason.SLOWER, tier=run.tier) for run in refused]
        end += sum(run.chunk_count for run in refused)
        if limited_count and not refused:
            missed.append(MissedRun(chunk_count=limited_count, reason=MissReason.TOO_LARGE))
            end += limited_count
        rest = len(prompt) - end
        if rest <= 0:
            return missed
        key = self._missing_item(prompt, end)
        if key is None:
            return [*missed, MissedRun(chunk_count=rest, reason=MissReason.TOO_LARGE)]
        count = rest
        if prompt.spec.matches_prefixes:
            absent = takewhile(lambda key: self._pool.get(key) is None, islice(prompt.keys, end + 1, None))
            count = 1 + sum(1 for _ in absent)
        missed.append(self.of_chunk(key, count, unanswered))
        if rest > count:
            missed.append(MissedRun(chunk_count=rest - count, reason=MissReason.BEHIND_GAP, tier=OWN))
        return missed

    def of_chunk(self, key: ChunkKey, chunk_count: int = 1, unanswered: Sequence[str] = ()) -> MissedRun:
        """Says why a chunk is missed that neither pool nor tiers have, for the run of `chunk_count` that it begins.

        `unanswered` are the tiers that this lookup has asked and that did not answer.
        """
        loss = self._losses.get(key)
        if loss is None or loss.reason not in REMOVED_EVERYWHERE:
            down = next((tier.name for tier in self._tiers if tier.is_down or tier.name in unanswered), "")
            if down:
                return MissedRun(chunk_count=chunk_count, reason=MissReason.TIER_DOWN, tier=down)
        if loss is None:
            return MissedRun(chunk_count=chunk_count, reason=MissReason.NEVER_STORED)
        tier = OWN if loss.tier == HOST else loss.tier
        return MissedRun(chunk_count=chunk_count, reason=loss.reason, tier=tier, time=loss.time)

    def _missing_item(self, prompt: Prompt, end: int) -> ChunkKey | None:
        """The first item that the pool lacks of a hit of `end` + 1 chunks: one of its last chunk, if there is any."""
        if prompt.spec.matches_prefixes:
            return prompt.key(0, end)
        last = [prompt.key(part, end) for part in range(len(prompt.spec.parts))]
        for key in (*last, *prompt.items(Hit(end + 1)).keys):
            if self._pool.get(key) is None:
                return key
        return None
