"""Hits of prompts whose chunks have several parts: which chunks an instance can load. Pure.

Lookups and operations use it for specs without `has_plain_parts`; of all others they match the chunks themselves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import KEY_BYTES, ChunkKey, join_keys, part_key
from lmkv.parts import longest_hit
from lmkv.spec import ALL, KvSpec
from lmkv_server.coordinator.core.layout_map import TIER_COUNT, LayoutMap, Match, MatchRun

MAX_TAIL_KEYS = 256
"""Keys of a tail; it is computed without a pause."""
MAX_KNOWN_HITS = 64
"""Hits of a prompt that are kept: many instances hold the same items of it as another one."""


def keys_of_part(chunk_keys: bytes, part: int) -> bytes:
    """The keys of one part of chunks; about half a microsecond per key for parts 1, 2, ..."""
    if not part:
        return chunk_keys
    starts = range(0, len(chunk_keys), KEY_BYTES)
    return join_keys(part_key(ChunkKey(chunk_keys[at : at + KEY_BYTES]), part) for at in starts)


def prefixes(layout: LayoutMap, spec: KvSpec, chunk_keys: bytes, excluded: str = "") -> list[Match]:
    """The instances that may have a hit of a prompt, with the longest possible one.

    If each hit needs all chunks of part 0: those that an instance holds. Otherwise the whole prompt, for each instance
    with chunks of the spec.
    """
    if spec.rule == ALL:
        return layout.lookup(chunk_keys, excluded)
    chunk_count = len(chunk_keys) // KEY_BYTES
    found = layout.holders_of_spec(spec.fingerprint) if chunk_count else []
    return [Match(one, chunk_count, chunk_count * spec.chunk_size, ()) for one in found if one != excluded]


def tail_keys(spec: KvSpec, chunk_keys: bytes, chunk_count: int) -> bytes | None:
    """The keys of the items of a hit that `prefixes` has not compared; None if there are more than `MAX_TAIL_KEYS`."""
    wanted = [
        (part, of_part.needed(chunk_count, spec.chunk_size))
        for part, of_part in enumerate(spec.parts)
        if part or spec.rule != ALL
    ]
    if sum(len(chunks) for _, chunks in wanted) > MAX_TAIL_KEYS:
        return None
    return b"".join(
        keys_of_part(chunk_keys[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES], part) for part, chunks in wanted
    )


def match_tail(layout: LayoutMap, prefix: Match, tail: bytes) -> Match | None:
    """The hit of all chunks of `prefix`, if the instance has it; `tail` is as `tail_keys` returns it."""
    tier = slowest_tier(layout, prefix.instance_id, tail)
    if not tier:
        return None
    tier = max(tier, *(run.tier for run in prefix.runs)) if prefix.runs else tier
    return prefix._replace(runs=(MatchRun(tier, prefix.chunk_count, prefix.token_count),))


def slowest_tier(layout: LayoutMap, instance_id: str, keys: bytes) -> int:
    """The slowest tier in which an instance holds one of the keys; 0 if it does not hold all. A key in several tiers
    counts for the fastest."""
    missing = int.from_bytes(b"\1" * (len(keys) // KEY_BYTES))
    for tier in range(1, TIER_COUNT + 1):
        missing &= ~int.from_bytes(layout.held(instance_id, tier, keys))
        if not missing:
            return tier
    return 0


class PromptParts:
    """A prompt's chunks, part by part."""

    def __init__(self, spec: KvSpec, keys: tuple[bytes, ...]) -> None:
        """`keys` has the keys of each part of all chunks, as `keys_of_part` returns them."""
        self.spec = spec
        self.all_keys = keys
        self._known_hits: dict[tuple[bytes, ...], int] = {}
        """Hits by the flags of what is held."""

    def item_keys(self, chunk_count: int) -> bytes:
        """The keys of the items of a hit, in the order of `KvSpec.items`."""
        wanted = (part.needed(chunk_count, self.spec.chunk_size) for part in self.spec.parts)
        return b"".join(
            keys[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES]
            for keys, chunks in zip(self.all_keys, wanted, strict=True)
        )

    def hit_at(self, layout: LayoutMap, instance_id: str, tier: int, limit: int | None = None) -> int:
        """Chunks of the longest hit of which an instance holds each item in one tier (0: in any); at most `limit`."""
        size_bytes = None if limit is None else limit * KEY_BYTES
        return self._longest(tuple(layout.held(instance_id, tier, keys[:size_bytes]) for keys in self.all_keys))

    def hit_at_either(self, layout: LayoutMap, one: tuple[str, int], other: tuple[str, int]) -> int:
        """As `hit_at`, with each item at one or the other position, which are instance and tier."""
        masks = (layout.held_mask(*one, keys) | layout.held_mask(*other, keys) for keys in self.all_keys)
        return self._longest(tuple(mask.tobytes() for mask in masks))

    def hit_of(self, keys: NDArray[np.void]) -> int:
        """Chunks of the longest hit of which all items are among `keys`."""
        masks = (np.isin(np.frombuffer(column, keys.dtype), keys) for column in self.all_keys)
        return self._longest(tuple(mask.tobytes() for mask in masks))

    def match(self, layout: LayoutMap, prefix: Match) -> Match | None:
        """The longest hit of the instance of `prefix`, in any tier; None if it has none.

        It is one run, in the slowest tier that a needed item is in.
        """
        chunk_count = self.hit_at(layout, prefix.instance_id, 0, prefix.chunk_count)
        if not chunk_count:
            return None
        tier = slowest_tier(layout, prefix.instance_id, self.item_keys(chunk_count))
        token_count = chunk_count * self.spec.chunk_size
        return Match(prefix.instance_id, chunk_count, token_count, (MatchRun(tier, chunk_count, token_count),))

    def _longest(self, flags: tuple[bytes, ...]) -> int:
        """The longest hit, by a byte for each chunk of each part: whether it is there."""
        known = self._known_hits.get(flags)
        if known is None:
            if len(self._known_hits) == MAX_KNOWN_HITS:
                self._known_hits.clear()
            masks = [np.frombuffer(of_part, np.bool_) for of_part in flags]
            known = self._known_hits[flags] = longest_hit(self.spec.parts, self.spec.chunk_size, masks)
        return known
