"""Prefetches: chunks come into the pool from other tiers without a request. Used by `HintExecutor`."""

from __future__ import annotations

from lmkv.hints import HintOutcome, HintReason, HintResult
from lmkv.runtime.places import requester
from lmkv.runtime.turns import Slots
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.hints.background import MAX_TASKS, BackgroundTasks
from lmkv_server.node.hints.prompt_hint import PromptHint
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.stack import TierStack

POOL_SHARE = 4
"""One prefetch brings at most 1/4 of the pool."""
MAX_READS = 4
"""Prefetches that read at a time; others wait."""
READ_SECONDS = 30.0


class Prefetches:
    """The prefetches of one node. The chunks may be evicted like any other once they have arrived."""

    def __init__(self, tier: HostTier, stack: TierStack, background: BackgroundTasks) -> None:
        self._tier = tier
        self._stack = stack
        self._background = background
        self._slots = Slots(MAX_READS)

    async def begin(self, hint: PromptHint) -> HintResult:
        """Looks the prompt up, and begins to read what the pool lacks. Raises nothing but for cancellation."""
        lookup = self._stack.begin(hint.prompt(self._tier), self._tier.size_bytes)
        lookup.most_bytes = lookup.own_bytes + max(hint.spec.chunk_bytes, self._tier.size_bytes // POOL_SHARE)
        if not lookup.is_complete and self._stack.usable:
            await self._stack.ask(lookup)
        found = lookup.result()
        if not found.chunk_count:
            return hint.ended(HintOutcome.MISSING)
        outcome = HintOutcome.ACCEPTED if found.chunk_count == len(hint.keys) else HintOutcome.CLIPPED
        if found.absent_count:
            if self._background.is_full:
                return hint.rejected(HintReason.QUOTA, f"{MAX_TASKS} hints run already")
            if self._slots.is_locked:
                outcome = HintOutcome.DEFERRED
            self._background.start(self._read(found))
        return hint.ended(outcome, found.chunk_count)

    async def _read(self, found: Found) -> None:
        async with self._slots.take(requester.get()):
            await self._stack.load(
                found,
                range(len(found.own), len(found.items)),
                READ_SECONDS,
                lambda chunks: self._tier.unhold(chunk for _, chunk in chunks),
            )
        self._tier.find(found.items.keys)  # counts as a use: the prompt is about to be
