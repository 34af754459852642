"""Matches of a prompt that end with a partial chunk of another one, which has the same tokens up to its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmkv.keys import KEY_BYTES, ChunkKey, Tokens, partial_keys
from lmkv_server.coordinator.core.layout_map import LayoutMap, Match, MatchRun

MAX_ENDS = 8
"""Places where matches end that are looked at, the last ones; and the beginning of the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTail:
    """What the keys of a prompt's chunks are computed from."""

    root: ChunkKey
    chunk_size: int
    tokens: Tokens


def with_tails(layout: LayoutMap, prompt: PromptTail, keys: bytes, matches: list[Match], excluded: str) -> list[Match]:
    """The matches, each with the longest partial chunk that its instance holds behind it.

    Also the instances that hold nothing of the prompt but such a chunk at its beginning.
    """
    by_end: dict[int, dict[str, Match]] = {}
    for match in matches:
        by_end.setdefault(match.chunk_count, {})[match.instance_id] = match
    found = {match.instance_id: match for match in matches}
    for end in sorted(by_end, reverse=True)[:MAX_ENDS]:
        for tail, token_count in _tails(layout, prompt, keys, end, excluded):
            if tail.instance_id in by_end[end]:
                found[tail.instance_id] = _joined(by_end[end].pop(tail.instance_id), tail, token_count)
    for tail, token_count in _tails(layout, prompt, keys, 0, excluded):
        if tail.instance_id not in found:
            found[tail.instance_id] = _joined(Match(tail.instance_id, 0, 0, ()), tail, token_count)
    return list(found.values())


def keys_with_tail(layout: LayoutMap, prompt: PromptTail, keys: bytes, instance_id: str = "") -> bytes:
    """The prompt's keys, the last one that of the longest partial chunk that an instance, or any, holds at its end."""
    end = prompt.tokens.size // prompt.chunk_size
    for key, _, matches in _held_tails(layout, prompt, keys, end, ""):
        if not instance_id or any(match.instance_id == instance_id for match in matches):
            return keys[: end * KEY_BYTES] + key
    return keys


def _tails(layout: LayoutMap, prompt: PromptTail, keys: bytes, end: int, excluded: str) -> Iterator[tuple[Match, int]]:
    """The instances that hold a partial chunk behind the first `end` chunks, and its tokens; the longest first."""
    for _, length, matches in _held_tails(layout, prompt, keys, end, excluded):
        for match in matches:
            yield match, length


def _held_tails(
    layout: LayoutMap, prompt: PromptTail, keys: bytes, end: int, excluded: str
) -> Iterator[tuple[ChunkKey, int, Sequence[Match]]]:
    """Partial chunks behind the first `end` chunks, their tokens, and who holds them; the longest first."""
    begin = end * prompt.chunk_size
    tokens = prompt.tokens[begin : begin + prompt.chunk_size]
    if not tokens.size:
        return
    parent = ChunkKey(keys[(end - 1) * KEY_BYTES : end * KEY_BYTES]) if end else prompt.root
    lengths = [
        length for length in layout.partial_lengths(parent) if 0 < length <= tokens.size and length < prompt.chunk_size
    ]
    for length, key in reversed(partial_keys(parent, tokens, lengths)):
        yield key, length, layout.lookup(key, excluded)


def _joined(match: Match, tail: Match, token_count: int) -> Match:
    """The match with one more chunk, in the tier of the tail."""
    runs, tier = match.runs, tail.runs[0].tier
    last = MatchRun(tier, 1, token_count)
    if runs and runs[-1].tier == tier:
        last = MatchRun(tier, runs[-1].chunk_count + 1, runs[-1].token_count + token_count)
        runs = runs[:-1]
    return Match(match.instance_id, match.chunk_count + 1, match.token_count + token_count, (*runs, last))
