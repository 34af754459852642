"""Why chunks of a prompt were missed: decided where its hit ends, from what pool and tiers are known to have held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.prompt import Hit, Prompt
from lmkv.tiers import HOST, OWN, Run
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.losses import Losses
from lmkv_server.node.tiers.base import SecondaryTier

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
    """When it left that tier, in seconds since 1970; 0 if that is unknown."""


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
        """Why a chunk that neither pool nor tiers have is missed, for the run of `chunk_count` that begins with it.

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
