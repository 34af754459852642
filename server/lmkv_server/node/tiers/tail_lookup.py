"""A lookup of the tail of a hit: the longest partial chunk with the prompt's next tokens, in pool and tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.tiers import OWN
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.partial_chunks import PartialChunks, PromptTokens
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier
from lmkv_server.node.tiers.hit import Hit, Tail

MIN_GAIN_TOKENS = 16
"""A partial chunk is brought into the pool only if it has this many tokens more than the best one that is nearer."""

MAX_CANDIDATES = 1024
"""Most chunks that a tier is asked for, the longest ones."""


class TailLookup:
    """Finds the tail of one hit, which has the full chunks before chunk `end` of the prompt. One event loop owns it."""

    def __init__(
        self,
        tier: HostTier,
        index: PartialChunks,
        spec: KvSpec,
        prompt: PromptTokens,
        keys: Sequence[ChunkKey],
        end: int,
    ) -> None:
        """`keys` are those of the prompt's chunks."""
        self._spec = spec
        self._prompt = prompt
        self._keys = keys
        self._end = end
        self._local = self._candidates(index.lengths(prompt.parent(keys, end)))
        self.tail: Tail | None = self._in_pool(tier)
        """The best tail that was found so far."""

    async def ask(self, tiers: Iterable[SecondaryTier], hit: Hit, tokens_per_second: float) -> None:
        """Asks the tiers for longer tails, each after those before it; `hit` is what they hold of the full chunks.

        A tail that takes longer to load than to compute is left out, if both times are known. Raises nothing.
        """
        for tier in tiers:
            if tier.usable:
                await self._ask(tier, hit.presences.get(tier.name, Presence()), tokens_per_second)

    async def _ask(self, tier: SecondaryTier, known: Presence, tokens_per_second: float) -> None:
        nearer_count = self.tail.token_count if self.tail else 0
        candidates = self._local if tier.is_local else ()
        if known.partial_lengths and known.end == self._end:
            candidates = self._candidates(known.partial_lengths)
        longer = [one for one in candidates if one[0] >= nearer_count + MIN_GAIN_TOKENS][:MAX_CANDIDATES]
        if not longer:
            return
        keys = [key for _, key in longer]
        presence = await tier.lookup(
            Needs(spec=self._spec, keys=keys, indices=range(len(keys)), in_order=False, any_of=True)
        )
        if not presence.indices:
            return
        token_count, key = longer[presence.indices[0]]
        seconds = tier.expected_seconds(presence, self._spec.size_bytes(token_count))
        if tokens_per_second > 0 and seconds is not None and seconds > (token_count - nearer_count) / tokens_per_second:
            return
        self.tail = Tail(tier=tier.name, key=key, token_count=token_count, presence=presence)

    def _in_pool(self, tier: HostTier) -> Tail | None:
        for token_count, key in self._local:
            chunk = tier.get(key)
            if chunk and chunk.fingerprint == self._spec.fingerprint and chunk.token_count == token_count:
                return Tail(tier=OWN, key=key, token_count=token_count, chunk=chunk)
        return None

    def _candidates(self, lengths: Iterable[int]) -> Sequence[tuple[int, ChunkKey]]:
        return self._prompt.partials(self._keys, self._end, lengths)
