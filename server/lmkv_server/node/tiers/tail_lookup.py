"""A lookup of the tail of a hit: the chunk that begins with most of the prompt's next tokens, in pool and tiers."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.tiers import OWN
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.partial_chunks import ChunkEnd, PartialChunks, PromptTokens
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier, deadline_at
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
        self._local = index.ends(prompt, keys, end)
        self.tail: Tail | None = self._in_pool(tier)
        """The best tail that was found so far."""

    @property
    def is_whole(self) -> bool:
        """Whether the tail has all of the prompt's tokens behind the full chunks."""
        return self.tail is not None and self.tail.token_count == self._rest_count

    @property
    def _rest_count(self) -> int:
        return self._prompt.tokens.size - self._end * self._prompt.chunk_size

    async def ask(
        self, tiers: Sequence[SecondaryTier], hit: Hit, tokens_per_second: float, *, deadline: float | None = None
    ) -> None:
        """Asks the tiers for longer tails, each after those before it; `hit` is what they hold of the full chunks.

        A tail that takes longer to load than to compute is left out, if both times are known. Raises nothing.
        """
        for at, tier in enumerate(tiers):
            if tier.usable and not self.is_whole:
                known = hit.presences.get(tier.name, Presence())
                await self._ask(tier, known, tokens_per_second, deadline_at(tiers, at, deadline))

    async def _ask(
        self, tier: SecondaryTier, known: Presence, tokens_per_second: float, deadline: float | None
    ) -> None:
        nearer_count = self.tail.token_count if self.tail else 0
        least_count = nearer_count + MIN_GAIN_TOKENS
        candidates = self._local if tier.is_local else ()
        digests = b""
        if known.partial_lengths and known.end == self._end:
            exact = self._prompt.partials(self._keys, self._end, known.partial_lengths)
            candidates = [ChunkEnd(key=key, token_count=count, stored_token_count=count) for count, key in exact]
            if min(known.partial_lengths[-1], self._rest_count) >= least_count:
                digests = self._prompt.prefixes(self._keys, self._end)
        longer = [one for one in candidates if one.token_count >= least_count][:MAX_CANDIDATES]
        if not longer and not digests:
            return
        presence = await tier.lookup(
            Needs(
                spec=self._spec,
                keys=[one.key for one in longer],
                indices=range(len(longer)),
                in_order=False,
                any_of=True,
                root=self._prompt.parent(self._keys, self._end),
                prefix_digests=digests,
                deadline=deadline,
            )
        )
        found = presence.beginning or (longer[presence.indices[0]] if presence.indices else None)
        if found is None or found.token_count < least_count:
            return
        token_count = found.token_count
        seconds = tier.expected_seconds(presence, self._spec.size_bytes(found.stored_token_count))
        if tokens_per_second > 0 and seconds is not None and seconds > (token_count - nearer_count) / tokens_per_second:
            return
        self.tail = Tail(
            tier=tier.name,
            key=found.key,
            token_count=token_count,
            stored_token_count=found.stored_token_count,
            presence=presence,
        )

    def _in_pool(self, tier: HostTier) -> Tail | None:
        for one in self._local:
            chunk = tier.get(one.key)
            if chunk and chunk.fingerprint == self._spec.fingerprint and chunk.token_count == one.stored_token_count:
                return Tail(
                    tier=OWN,
                    key=one.key,
                    token_count=one.token_count,
                    stored_token_count=one.stored_token_count,
                    chunk=chunk,
                )
        return None
