"""Lookups of prompts whose chunks have several parts, in steps between which other tasks run."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

from lmkv.keys import KEY_BYTES
from lmkv.spec import KvSpec
from lmkv_server.coordinator.core.layout_map import LayoutMap, Match
from lmkv_server.coordinator.core.part_match import match_tail, prefixes, tail_keys
from lmkv_server.coordinator.registry.selection import SHORT_KEYS, Selector

HASHED_KEYS = 16
MATCH_KEYS = 64
"""The work of computing one key of a part, and of matching one instance, as a number of keys to read."""


class PartLookup:
    """Matches prompts of one tenant; long ones with many instances one at a time."""

    def __init__(self, layout: LayoutMap, selector: Selector) -> None:
        self._layout = layout
        self._selector = selector
        self._long = asyncio.Lock()
        self._work = 0
        """Since other tasks last ran, as a number of keys to read."""

    async def lookup(self, spec: KvSpec, keys: bytes, excluded: str = "") -> list[Match]:
        """The longest hit of each instance but `excluded`, in no order; `keys` are those of part 0."""
        found = prefixes(self._layout, spec, keys, excluded)
        if not found:
            return []
        async with self._long if len(keys) > SHORT_KEYS * KEY_BYTES else nullcontext():
            return await self._match(spec, keys, found)

    async def _match(self, spec: KvSpec, keys: bytes, found: list[Match]) -> list[Match]:
        matches, others = [], []
        chunk_count, tail = -1, None
        for prefix in found:
            if prefix.chunk_count != chunk_count:  # mostly equal to that of the instance before
                chunk_count = prefix.chunk_count
                tail = tail_keys(spec, keys, chunk_count)
                self._work += len(tail or b"") // KEY_BYTES * HASHED_KEYS
            match = None if tail is None else match_tail(self._layout, prefix, tail)
            if match:
                matches.append(match)
            else:
                others.append(prefix)
            await self._pause_if_due(MATCH_KEYS)
        if not others:
            return matches
        longest = max(prefix.chunk_count for prefix in others)
        parts = await self._selector.parts_of(spec, keys[: longest * KEY_BYTES])
        for prefix in others:
            if match := parts.match(self._layout, prefix):
                matches.append(match)
            await self._pause_if_due(MATCH_KEYS + prefix.chunk_count * len(spec.parts))
        return matches

    async def _pause_if_due(self, work: int) -> None:
        self._work += work
        if self._work > SHORT_KEYS:
            self._work = 0
            await asyncio.sleep(0)
