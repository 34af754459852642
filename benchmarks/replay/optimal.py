"""The highest hit rate that any policy can have in a pool: Belady's, which knows all later requests."""

from __future__ import annotations

import heapq

from benchmarks.replay.traces import Trace, found_tokens
from lmkv.keys import ChunkKey

_NEVER = 1 << 62


def optimal(trace: Trace, pool_tokens: int) -> float:
    """The percentage of all prompts' tokens that are found if what is requested last, or never again, is evicted.

    A chunk is never requested earlier than the one before it in its prompt, so prefixes stay whole. Chunks that are
    requested later than all others are not stored at all.
    """
    later = _later(trace)
    capacity = pool_tokens // trace.chunk_tokens
    held: dict[ChunkKey, int] = {}  # when each is requested next
    latest: list[tuple[int, ChunkKey]] = []  # heap of negated times; entries that differ from `held` are void
    found = asked = 0
    for request, times in zip(trace.requests, later, strict=True):
        hit_count = 0
        for position, (key, time) in enumerate(zip(request.stored, times, strict=True)):
            if position == hit_count < len(request.keys) and key in held:
                hit_count += 1
            held[key] = time
            heapq.heappush(latest, (-time, key))
            while len(held) > capacity:
                time_of_victim, victim = heapq.heappop(latest)
                if held.get(victim) == -time_of_victim:
                    del held[victim]
        found += found_tokens(trace, request, hit_count)
        asked += request.token_count
    return 100 * found / asked


def _later(trace: Trace) -> list[list[int]]:
    """For each request and each chunk that is stored after it: when the chunk is requested next."""
    upcoming: dict[ChunkKey, int] = {}
    later: list[list[int]] = []
    time = sum(len(request.keys) for request in trace.requests)
    for request in reversed(trace.requests):
        later.append([upcoming.get(key, _NEVER) for key in request.stored])
        for key in reversed(request.keys):
            upcoming[key] = time
            time -= 1
    later.reverse()
    return later
