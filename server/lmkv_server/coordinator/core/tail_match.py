"""Matches of a prompt that end inside a chunk of another prompt, or with a partial chunk of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from lmkv.keys import KEY_BYTES, ChunkKey, Tokens, partial_keys, prefix_digests
from lmkv_server.coordinator.core.layout_map import LayoutMap, Match, MatchRun

MAX_ENDS = 8
"""Places where matches end that are looked at, the last ones; and the beginning of the prompt."""
MAX_BEGINNINGS = 64
"""Chunks that begin as a prompt does of which a lookup considers the ones with the most tokens in common."""


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
    """The prompt's keys, the last one that of the chunk with most of its end that an instance, or any, holds."""
    end = prompt.tokens.size // prompt.chunk_size
    for key, _, matches in _held_tails(layout, prompt, keys, end, ""):
        if not instance_id or any(match.instance_id == instance_id for match in matches):
            return keys[: end * KEY_BYTES] + key
    return keys


def keys_of_whole(layout: LayoutMap, prompt: PromptTail, keys: bytes) -> Iterator[ChunkKey]:
    """The keys of other chunks that begin with all of the prompt's tokens behind its full chunks."""
    end = prompt.tokens.size // prompt.chunk_size
    own = keys[end * KEY_BYTES :]
    if own:
        yield from (
            key for key, count in _beginnings(layout, prompt, keys, end) if count == _rest(prompt, end) and key != own
        )


def _rest(prompt: PromptTail, end: int) -> int:
    return min(prompt.tokens.size - end * prompt.chunk_size, prompt.chunk_size)


def _beginnings(layout: LayoutMap, prompt: PromptTail, keys: bytes, end: int) -> Iterator[tuple[ChunkKey, int]]:
    """Chunks behind the first `end` chunks that begin as the prompt does there, and the number of tokens in common."""
    parent, tokens = _behind(prompt, keys, end)
    if layout.has_digests(parent) and tokens.size:
        digests = prefix_digests(parent, tokens)
        for count, key in islice(layout.beginning_as(parent, digests), MAX_BEGINNINGS):
            yield ChunkKey(key), count


def _behind(prompt: PromptTail, keys: bytes, end: int) -> tuple[ChunkKey, Tokens]:
    """The key before the chunk behind the first `end` chunks, and the prompt's tokens in that chunk."""
    begin = end * prompt.chunk_size
    parent = ChunkKey(keys[(end - 1) * KEY_BYTES : end * KEY_BYTES]) if end else prompt.root
    return parent, prompt.tokens[begin : begin + prompt.chunk_size]


def _tails(layout: LayoutMap, prompt: PromptTail, keys: bytes, end: int, excluded: str) -> Iterator[tuple[Match, int]]:
    """The instances that hold a partial chunk behind the first `end` chunks, and its tokens; the longest first."""
    for _, length, matches in _held_tails(layout, prompt, keys, end, excluded):
        for match in matches:
            yield match, length


def _held_tails(
    layout: LayoutMap, prompt: PromptTail, keys: bytes, end: int, excluded: str
) -> Iterator[tuple[ChunkKey, int, Sequence[Match]]]:
    """Chunks with the prompt's tokens behind its first `end` chunks, how many they have, and who holds them; those with
    the most first."""
    parent, tokens = _behind(prompt, keys, end)
    if not tokens.size:
        return
    lengths = [
        length for length in layout.partial_lengths(parent) if 0 < length <= tokens.size and length < prompt.chunk_size
    ]
    found = {key: length for length, key in partial_keys(parent, tokens, lengths)}
    found |= dict(_beginnings(layout, prompt, keys, end))
    for key, length in sorted(found.items(), key=lambda one: -one[1]):
        yield key, length, layout.lookup(key, excluded)


def _joined(match: Match, tail: Match, token_count: int) -> Match:
    """The match with one more chunk, in the tier of the tail."""
    runs, tier = match.runs, tail.runs[0].tier
    last = MatchRun(tier, 1, token_count)
    if runs and runs[-1].tier == tier:
        last = MatchRun(tier, runs[-1].chunk_count + 1, runs[-1].token_count + token_count)
        runs = runs[:-1]
    return Match(match.instance_id, match.chunk_count + 1, match.token_count + token_count, (*runs, last))
