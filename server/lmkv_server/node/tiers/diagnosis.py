"""Why chunks of a prompt were missed: decided where its hit ends, from what pool and tiers are known to have held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from lmkv.keys import ChunkKey, part_key
from lmkv.misses import MissReason
from lmkv.spec import KvSpec
from lmkv.tiers import HOST, OWN, Run
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.losses import Losses
from lmkv_server.node.cache.prompt_items import PromptItems
from lmkv_server.node.tiers.base import Presence, SecondaryTier

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
        keys: Sequence[ChunkKey],
        end: int,
        *,
        refused: Sequence[Run] = (),
        presences: Mapping[str, Presence] | None = None,
        is_limited: bool = False,
    ) -> list[MissedRun]:
        """The missed runs from chunk `end` on, where a hit ends, up to the end of the prompt.

        `refused` are the runs there that are slower to load than to compute, and `presences` what the tiers that were
        asked have. `is_limited`: whether no more chunks may be held for the engine.
        """
        missed = [MissedRun(chunk_count=run.chunk_count, reason=MissReason.SLOWER, tier=run.tier) for run in refused]
        end += sum(run.chunk_count for run in refused)
        if is_limited and not refused and (count := self._held_count(keys, end, presences or {})):
            missed.append(MissedRun(chunk_count=count, reason=MissReason.TOO_LARGE))
            end += count
        if end < len(keys):
            absent = takewhile(lambda key: self._pool.get(key) is None, islice(keys, end + 1, None))
            count = 1 + sum(1 for _ in absent)
            unanswered = [name for name, presence in (presences or {}).items() if not presence.is_answered]
            missed.append(self.of_chunk(keys[end], count, unanswered))
            if rest := len(keys) - end - count:
                missed.append(MissedRun(chunk_count=rest, reason=MissReason.BEHIND_GAP, tier=OWN))
        return missed

    def behind_items(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        end: int,
        *,
        refused_count: int = 0,
        unanswered: Sequence[str] = (),
    ) -> list[MissedRun]:
        """As `behind`, if chunks have several parts: by the first item that a hit of one more chunk lacks.

        `unanswered` are the tiers that were asked and did not answer.
        """
        missed = [MissedRun(chunk_count=refused_count, reason=MissReason.SLOWER)] if refused_count else []
        end += refused_count
        if end < len(keys):
            key, rest = self._missing_item(spec, keys, end), len(keys) - end
            too_large = MissedRun(chunk_count=rest, reason=MissReason.TOO_LARGE)
            missed.append(self.of_chunk(key, rest, unanswered) if key else too_large)
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

    def _held_count(self, keys: Sequence[ChunkKey], end: int, presences: Mapping[str, Presence]) -> int:
        """Chunks from `end` on without a gap that the pool has, or else that a tier has."""
        own = takewhile(lambda key: self._pool.get(key) is not None, islice(keys, end, None))
        return sum(1 for _ in own) or max((one.run_from(end) for one in presences.values()), default=0)

    def _missing_item(self, spec: KvSpec, keys: Sequence[ChunkKey], end: int) -> ChunkKey | None:
        """The first item that the pool lacks of a hit of `end` + 1 chunks: one of its last chunk, if there is any."""
        last = [part_key(keys[end], part) for part in range(len(spec.parts))]
        for key in (*last, *PromptItems.of_hit(spec, keys, end + 1).keys):
            if self._pool.get(key) is None:
                return key
        return None
