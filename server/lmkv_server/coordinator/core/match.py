"""Hits of prompts in a layout map: which of their items an instance holds. Pure; used by lookups and operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import KEY_BYTES, ChunkKey, part_key
from lmkv.prompt import Hit, Prompt, Tail, first_missing, match
from lmkv.spec import ALL
from lmkv_server.coordinator.core.layout_map import TIER_COUNT, LayoutMap, Match, MatchRun

MAX_UNPREPARED_KEYS = 256
"""Keys of a part that are computed without a pause."""
MAX_ENDS = 8
"""Places where matches end behind which tails are looked for, the last ones; and the beginning of the prompt."""

Position = tuple[str, int]
"""An instance, and a tier (0: any)."""

_NOTHING = Match("", 0, 0, ())


class UnpreparedError(Exception):
    """More keys of parts are to be computed than without a pause: the caller prepares the prompt, and tries again."""


class HeldAt:
    """The chunks of a prompt that a position holds, or that several positions hold together."""

    def __init__(
        self, layout: LayoutMap, prompt: Prompt, *positions: Position, known_prefix: int | None = None
    ) -> None:
        """`known_prefix`: how many chunks are held of part 0, from the first on, if a lookup has found that."""
        self._layout = layout
        self._prompt = prompt
        self._positions = positions
        self._known_prefix = known_prefix

    def prefix(self, part: int, count: int) -> int:
        """As `Held.prefix`. Raises `UnpreparedError`."""
        if not part and self._known_prefix is not None:
            return min(self._known_prefix, count)
        keys = self._keys(part, 0, count)
        if len(self._positions) == 1:
            return self._layout.match_at(*self._positions[0], keys)[0]
        absent = self._held(keys).find(0)
        return count if absent < 0 else absent

    def flags(self, part: int, start: int, stop: int) -> bytes:
        """As `Held.flags`. Raises `UnpreparedError`."""
        return self._held(self._keys(part, start, stop))

    def tails(self, _: int) -> Sequence[Tail]:
        """Returns none: `with_tails` looks for the tails of all instances together."""
        return ()

    def _held(self, keys: bytes) -> bytes:
        flags = [self._layout.held(*position, keys) for position in self._positions]
        if len(flags) == 1:
            return flags[0]
        joined: NDArray[np.uint8] = np.bitwise_or.reduce([np.frombuffer(one, np.uint8) for one in flags])
        return joined.tobytes()

    def _keys(self, part: int, start: int, stop: int) -> bytes:
        if part and stop - start > MAX_UNPREPARED_KEYS and not self._prompt.has_keys(part, start, stop):
            raise UnpreparedError
        return self._prompt.packed_keys(part, start, stop)


def item_keys(prompt: Prompt, hit: Hit) -> bytes:
    """The keys of the items of a hit, in their order."""
    end, size = prompt.end(hit), prompt.spec.chunk_size
    needed = (part.needed(end, size) for part in prompt.spec.parts)
    return b"".join(prompt.packed_keys(part, chunks.start, chunks.stop) for part, chunks in enumerate(needed))


def prefixes(layout: LayoutMap, prompt: Prompt, excluded: str = "") -> list[Match]:
    """The instances that may have a hit of a prompt, with the longest possible one: the longest first.

    If each hit needs all chunks of part 0: those that an instance holds. Otherwise the whole prompt, for each instance
    with chunks of the spec.
    """
    if prompt.spec.rule == ALL or not len(prompt):
        return layout.lookup(prompt.packed, excluded)
    found = layout.holders_of_spec(prompt.spec.fingerprint)
    count, end = len(prompt), prompt.end(Hit(len(prompt)))
    return [Match(one, count, end, ()) for one in found if one != excluded]


def match_of(layout: LayoutMap, prompt: Prompt, prefix: Match) -> Match | None:
    """The longest hit of an instance that has at most the chunks of `prefix`; None if it has none.

    Raises `UnpreparedError`.
    """
    known = prefix.chunk_count if prompt.spec.rule == ALL else None
    hit = match(prompt, HeldAt(layout, prompt, (prefix.instance_id, 0), known_prefix=known))
    return _as_match(layout, prompt, prefix, hit) if hit.chunk_count else None


def _as_match(layout: LayoutMap, prompt: Prompt, prefix: Match, hit: Hit) -> Match:
    """A hit as one run, in the slowest tier that an item is in: it can be loaded only as a whole."""
    end, size = prompt.end(hit), prompt.spec.chunk_size
    tiers, keys = [0], []
    for number, part in enumerate(prompt.spec.parts):
        chunks = part.needed(end, size)
        if not number and prefix.runs and chunks.start == 0 and hit.chunk_count == prefix.chunk_count:
            tiers += [run.tier for run in prefix.runs]
        else:
            keys.append(prompt.packed_keys(number, chunks.start, min(chunks.stop, hit.chunk_count)))
    if hit.tail:
        keys += [part_key(hit.tail.key, part) for part in prompt.tail_parts(hit.chunk_count, hit.tail)]
    tier = max(*tiers, slowest_tier(layout, prefix.instance_id, b"".join(keys)))
    count = hit.chunk_count + (hit.tail is not None)
    return Match(prefix.instance_id, count, end, (MatchRun(tier, count, end),))


def slowest_tier(layout: LayoutMap, instance_id: str, keys: bytes) -> int:
    """The slowest tier in which an instance holds one of the keys; 0 if it does not hold all. A key in several tiers
    counts for the fastest."""
    missing = int.from_bytes(b"\1" * (len(keys) // KEY_BYTES))
    for tier in range(1, TIER_COUNT + 1):
        missing &= ~int.from_bytes(layout.held(instance_id, tier, keys))
        if not missing:
            return tier
    return 0


# --- Tails -------------------------------------------------------------------------------------------------------


def with_tails(
    layout: LayoutMap, prompt: Prompt, matches: Sequence[Match], prefixes: Sequence[Match], excluded: str
) -> list[Match]:
    """The matches, each with the longest tail that its instance holds behind it, or behind its prefix.

    Also the instances that hold nothing of the prompt but a tail at its beginning.
    """
    best = {one.instance_id: one for one in matches}
    by_end: dict[int, dict[str, Match]] = {0: {}}
    for one in (*prefixes, *matches):
        by_end.setdefault(one.chunk_count, {})[one.instance_id] = one
    for end in [*sorted(by_end, reverse=True)[:MAX_ENDS], 0] if prompt.may_end_behind(0) else ():
        for tail, holder in _holders(layout, prompt, end, excluded):
            before = by_end[end].get(holder.instance_id)
            if before is None and not end and holder.instance_id not in best:
                before = Match(holder.instance_id, 0, 0, ())
            if before and (found := _joined(layout, prompt, before, Hit(end, tail), holder)):
                by_end[end].pop(holder.instance_id, None)
                if found.token_count > best.get(holder.instance_id, _NOTHING).token_count:
                    best[holder.instance_id] = found
    return list(best.values())


def keys_with_tail(layout: LayoutMap, prompt: Prompt, instance_id: str = "") -> bytes:
    """The prompt's keys, the last one that of the chunk with most of its end that an instance, or any, holds."""
    if prompt.tokens is None or not prompt.spec.ends_anywhere:
        return prompt.packed
    end = prompt.tokens.size // prompt.spec.chunk_size
    holders = [one.instance_id for one in layout.lookup(prompt.packed[end * KEY_BYTES :])]
    if holders and instance_id in ("", *holders):
        return prompt.packed
    for tail, holder in _holders(layout, prompt, end, ""):
        if instance_id in ("", holder.instance_id):
            return prompt.packed[: end * KEY_BYTES] + tail.key
    return prompt.packed


def keys_of_whole(layout: LayoutMap, prompt: Prompt) -> Iterator[ChunkKey]:
    """The keys of other chunks that begin with all of the prompt's tokens behind its full chunks."""
    if prompt.tokens is None or not prompt.tokens.size % prompt.spec.chunk_size:
        return
    end = prompt.tokens.size // prompt.spec.chunk_size
    rest = prompt.tokens.size - end * prompt.spec.chunk_size
    yield from (tail.key for tail in prompt.tails(end, layout.ends) if tail.token_count == rest)


def _holders(layout: LayoutMap, prompt: Prompt, end: int, excluded: str) -> Iterator[tuple[Tail, Match]]:
    """Tails behind the first `end` chunks with the instances that hold what a hit needs of them; those with the most
    tokens first."""
    for tail in prompt.tails(end, layout.ends):
        keys = b"".join(part_key(tail.key, part) for part in prompt.tail_parts(end, tail))
        for holder in layout.lookup(keys, excluded):
            if holder.chunk_count == len(keys) // KEY_BYTES:
                yield tail, holder


def _joined(layout: LayoutMap, prompt: Prompt, before: Match, hit: Hit, holder: Match) -> Match | None:
    """The chunks of `before` with one more, of which `holder` has all parts; None if other items are missing."""
    assert hit.tail
    if not prompt.spec.matches_prefixes:
        lacking = first_missing(prompt, HeldAt(layout, prompt, (before.instance_id, 0)), hit)
        return None if lacking is not None else _as_match(layout, prompt, before, hit)
    runs, tier, token_count = before.runs, holder.runs[0].tier, hit.tail.token_count
    last = MatchRun(tier, 1, token_count)
    if runs and runs[-1].tier == tier:
        last = MatchRun(tier, runs[-1].chunk_count + 1, runs[-1].token_count + token_count)
        runs = runs[:-1]
    return Match(before.instance_id, before.chunk_count + 1, before.token_count + token_count, (*runs, last))
