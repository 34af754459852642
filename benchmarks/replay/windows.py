"""Counts how many tokens of hits are lost because not all windows are stored, and how many bytes the windows take.

No engine runs. The pool is unbounded, and each block of the trace is a chunk. `KvSpec.expected_ends` decides which
windows are stored. A trace does not show answers before the next turn, so no window is stored at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from benchmarks.replay.traces import Trace, found_tokens
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_LAST


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowCounts:
    """The outcome of a trace."""

    kept_share: float
    """Tokens that hits found, divided by the tokens that they would have found if all windows were stored."""
    bytes_ratio: float
    """Bytes that are stored, divided by the bytes if windows were stored only at the ends of prompts."""


def count_windows(trace: Trace, spec: KvSpec) -> WindowCounts:
    """Counts the prompts of a trace, in order; `spec` has chunks of the trace's blocks."""
    chunks = set[ChunkKey]()
    stored, ended = ([set[ChunkKey]() for _ in spec.parts] for _ in range(2))
    kept_tokens = found_count = 0
    for request in trace.requests:
        keys = request.keys
        full_count = request.token_count // spec.chunk_size
        prefix = sum(1 for _ in takewhile(chunks.__contains__, keys))
        hit = prefix
        while hit and not all(key in stored[part] for part, key in _windows(spec, keys, hit)):
            hit -= 1
        kept_tokens += found_tokens(trace, request, hit)
        found_count += found_tokens(trace, request, prefix)
        parted = {prefix} if hit < prefix else set[int]()
        for end in spec.expected_ends(full_count, request.token_count, parted):
            for part, key in _windows(spec, keys, end):
                stored[part].add(key)
        for part, key in _windows(spec, keys, full_count):
            ended[part].add(key)
        chunks.update(keys[:full_count])
    always = len(chunks) * sum(
        spec.part_bytes(number) for number, part in enumerate(spec.parts) if part.rule != PART_RULE_LAST
    )
    mine, least = (
        always + sum(len(keys) * spec.part_bytes(part) for part, keys in enumerate(held)) for held in (stored, ended)
    )
    return WindowCounts(
        kept_share=kept_tokens / found_count if found_count else 1.0, bytes_ratio=mine / least if least else 1.0
    )


def _windows(spec: KvSpec, keys: Sequence[ChunkKey], end: int) -> list[tuple[int, ChunkKey]]:
    """The windows that a hit of this many chunks reads, by part and the key of their chunk."""
    return [
        (number, keys[chunk])
        for number, part in enumerate(spec.parts)
        if part.rule == PART_RULE_LAST
        for chunk in part.needed(end * spec.chunk_size, spec.chunk_size)
    ]
