"""Prefetches: chunks come into the pool from other tiers without a request. Used by `HintExecutor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmkv.hints import HintOutcome, HintReason, HintResult
from lmkv.keys import ChunkKey
from lmkv.runtime.places import requester
from lmkv.runtime.turns import Slots
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.hints.background import MAX_TASKS, BackgroundTasks
from lmkv_server.node.hints.prompt_hint import PromptHint
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.hit import Hit

POOL_SHARE = 4
"""One prefetch brings at most 1/4 of the pool."""
MAX_READS = 4
"""Prefetches that read at a time; others wait."""
READ_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPrompt:
    """What pool and tiers hold of a hint's prompt."""

    prompt_chunks: int
    """Chunks of the prompt, from the first one on."""
    hit: Hit
    """Those of them that the pool lacks."""
    keys: Sequence[ChunkKey]
    """Of all of them, or of their parts."""
    own_count: int
    """Keys at the beginning that the pool holds."""


class Prefetches:
    """The prefetches of one node. The chunks may be evicted like any other once they have arrived."""

    def __init__(self, tier: HostTier, stack: TierStack, background: BackgroundTasks) -> None:
        self._tier = tier
        self._stack = stack
        self._background = background
        self._slots = Slots(MAX_READS)

    async def begin(self, hint: PromptHint) -> HintResult:
        """Looks the prompt up, and begins to read what the pool lacks. Raises nothing but for cancellation."""
        found = await (self._find_chunks(hint) if hint.spec.has_plain_parts else self._find_items(hint))
        if not found.prompt_chunks:
            return hint.ended(HintOutcome.MISSING)
        outcome = HintOutcome.ACCEPTED if found.prompt_chunks == len(hint.keys) else HintOutcome.CLIPPED
        if found.hit.chunk_count:
            if self._background.is_full:
                return hint.rejected(HintReason.QUOTA, f"{MAX_TASKS} hints run already")
            if self._slots.is_locked:
                outcome = HintOutcome.DEFERRED
            self._background.start(self._read(hint, found))
        return hint.ended(outcome, found.prompt_chunks)

    async def _find_chunks(self, hint: PromptHint) -> FoundPrompt:
        spec, keys = hint.spec, hint.keys
        own = len(self._tier.find(keys))
        limit = max(1, self._tier.size_bytes // POOL_SHARE // spec.chunk_bytes)
        hit = await self._stack.lookup(spec, keys, own, limit) if own < len(keys) and self._stack.usable else Hit()
        count = own + hit.chunk_count
        return FoundPrompt(prompt_chunks=count, hit=hit, keys=keys[:count], own_count=own)

    async def _find_items(self, hint: PromptHint) -> FoundPrompt:
        budget_bytes = self._tier.size_bytes // POOL_SHARE
        lookup = self._stack.begin_items(hint.spec, hint.keys)
        if not lookup.is_complete and self._stack.usable:
            await self._stack.ask_for_items(lookup, budget_bytes)
        found = lookup.result(budget_bytes)
        keys = found.rest.items.keys if found.rest.items else ()
        return FoundPrompt(prompt_chunks=found.chunk_count, hit=found.rest, keys=keys, own_count=len(found.own))

    async def _read(self, hint: PromptHint, found: FoundPrompt) -> None:
        async with self._slots.take(requester.get()):
            await self._stack.load(
                found.hit,
                hint.spec,
                found.keys,
                found.own_count,
                READ_SECONDS,
                lambda chunks: self._tier.unhold(chunk for _, chunk in chunks),
            )
        self._tier.find(found.keys)  # counts as a use: the prompt is about to be
