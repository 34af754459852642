"""Hits of prompts whose chunks have several parts: which chunks an instance can load. Pure.

Lookups and operations use it for specs without `has_plain_parts`; of all others they match the chunks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import KEY_BYTES, ChunkKey, join_keys, part_key
from lmkv.parts import longest_hit
from lmkv.spec import ALL, KvSpec
from lmkv_server.coordinator.core.layout_map import TIER_COUNT, LayoutMap, Match, MatchRun

MAX_KNOWN_HITS = 64
"""Hits of a prompt that are kept: most instances hold the same items of it as another one."""


def keys_of_part(chunk_keys: bytes, part: int) -> bytes:
    """The keys of one part of chunks; about half a microsecond per key for parts 1, 2, ..."""
    if not part:
        return chunk_keys
    starts = range(0, len(chunk_keys), KEY_BYTES)
    return join_keys(part_key(ChunkKey(chunk_keys[at : at + KEY_BYTES]), part) for at in starts)


def hit_limits(layout: LayoutMap, spec: KvSpec, chunk_keys: bytes, excluded: str = "") -> dict[str, int]:
    """The instances that may have a hit of a prompt, and the chunks that it has at most."""
    if spec.rule == ALL:
        return {match.instance_id: match.chunk_count for match in layout.lookup(chunk_keys, excluded)}
    chunk_count = len(chunk_keys) // KEY_BYTES
    return {one: chunk_count for one in layout.holders_of_spec(spec.fingerprint) if one != excluded}


class PromptParts:
    """A prompt's chunks, part by part."""

    def __init__(self, spec: KvSpec, keys: tuple[bytes, ...]) -> None:
        """`keys` has the keys of each part of all chunks, as `keys_of_part` returns them."""
        self.spec = spec
        self._keys = keys
        self._known_hits: dict[tuple[bytes, ...], int] = {}
        """Hits by the masks of what is held."""

    @property
    def chunk_count(self) -> int:
        """Chunks of the prompt."""
        return len(self._keys[0]) // KEY_BYTES

    def item_keys(self, chunk_count: int) -> bytes:
        """The keys of the items of a hit, in the order of `KvSpec.items`."""
        wanted = (part.needed(chunk_count, self.spec.chunk_size) for part in self.spec.parts)
        return b"".join(
            keys[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES]
            for keys, chunks in zip(self._keys, wanted, strict=True)
        )

    def hit_at(self, layout: LayoutMap, *positions: tuple[str, int], limit: int | None = None) -> int:
        """Chunks of the longest hit of which each item is held at one of the positions: instance and tier (0: any).

        At most `limit`.
        """
        size_bytes = None if limit is None else limit * KEY_BYTES
        return self._longest(tuple(_held(layout, positions, keys[:size_bytes]) for keys in self._keys))

    def hit_of(self, keys: NDArray[np.void]) -> int:
        """Chunks of the longest hit of which all items are among `keys`."""
        return self._longest(tuple(np.isin(np.frombuffer(column, keys.dtype), keys) for column in self._keys))

    @property
    def all_keys(self) -> tuple[bytes, ...]:
        """The keys of each part of all chunks."""
        return self._keys

    def match(self, layout: LayoutMap, instance_id: str, limit: int) -> Match | None:
        """The longest hit of an instance, in any tier; None if it has none. One run, in the slowest tier that a needed
        item is in."""
        chunk_count = self.hit_at(layout, (instance_id, 0), limit=limit)
        if not chunk_count:
            return None
        tier = self._slowest_tier(layout, instance_id, chunk_count)
        token_count = chunk_count * self.spec.chunk_size
        return Match(instance_id, chunk_count, token_count, (MatchRun(tier, chunk_count, token_count),))

    def _longest(self, masks: tuple[NDArray[np.bool_], ...]) -> int:
        name = tuple(mask.tobytes() for mask in masks)
        known = self._known_hits.get(name)
        if known is None:
            if len(self._known_hits) == MAX_KNOWN_HITS:
                self._known_hits.clear()
            known = self._known_hits[name] = longest_hit(self.spec.parts, self.spec.chunk_size, masks)
        return known

    def _slowest_tier(self, layout: LayoutMap, instance_id: str, chunk_count: int) -> int:
        keys = self.item_keys(chunk_count)
        held = np.zeros(len(keys) // KEY_BYTES, np.bool_)
        for tier in range(1, TIER_COUNT + 1):
            held |= layout.held_mask(instance_id, tier, keys)
            if held.all():
                break
        return tier


def _held(layout: LayoutMap, positions: Sequence[tuple[str, int]], keys: bytes) -> NDArray[np.bool_]:
    """Which of the keys are held at one of the positions."""
    masks = [layout.held_mask(*position, keys) for position in positions]
    return masks[0] if len(masks) == 1 else np.logical_or.reduce(masks)
