"""A fleet of simulated engines that serves a recorded trace, with requests placed by the picker's own routing.

An engine computes one prompt at a time, what it does not find in its cache at `PREFILL_RATE`, and generates answers
beside that at `ANSWER_RATE`. A chunk is stored once its prompt is computed, and known to the layout map
`REPORT_SECONDS` later.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from benchmarks.replay.traces import Request, Trace, found_tokens
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import POLICIES, EvictionQueue
from lmkv_server.proxy.engine import BOTH, Engine, QueuedPrompt
from lmkv_server.proxy.routing.pools import EnginePool, HeldTokens, RecentPicks, SessionAffinity, cost_by

PREFILL_RATE = 10_000.0
"""Tokens per second of one engine."""
ANSWER_RATE = 30.0
"""Tokens per second of one answer."""
REPORT_SECONDS = 0.1
"""From a change of a cache until the layout map has it."""
SHARED_FRACTION = 0.01
"""A chunk that more of the requests have in common is no part of a session: a system prompt, for example."""
SESSION_TTL = 600.0

PICKER, ROUND_ROBIN, SESSIONS, ORACLE = "picker", "in_turn", "session_affinity", "oracle"
PLACEMENTS = (PICKER, ROUND_ROBIN, SESSIONS, ORACLE)
OTHER = "other"
"""
- `picker`: policy kv_aware of `lmkv picker` and `lmkv proxy`, which sees when prompts are computed.
- `in_turn`: their policy `round_robin`.
- `session_affinity`: a session stays with its engine, and begins at the least loaded one.
- `oracle`: all engines share one cache of the size of all caches together, and it holds a prompt from the moment of its
  arrival. So every request is where all is held that any engine holds or computes, nothing is held twice, and no cache
  is full before another one. Load does not count. No placement finds more, except where caches are so small that
  eviction decides: there the same policy may find a little more in several small caches than in one.
- `other`: a router that is no part of lmkv, see `OtherRouter`.
"""


class OtherRouter(Protocol):
    """A router that learns what the picker knows: requests when they come, changes of caches `REPORT_SECONDS` late."""

    def choose(self, name: str, keys: Sequence[ChunkKey]) -> str:
        """The engine's instance id for a request of this name."""

    def computed(self, name: str) -> None:
        """The request's prompt is computed."""

    def answered(self, name: str) -> None:
        """The request is answered."""

    def change(self, instance: str, new: Sequence[ChunkKey], evicted: Sequence[ChunkKey]) -> None:
        """An instance's cache has changed."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The result of simulating a trace."""

    asked_tokens: int = 0
    hit_tokens: int = 0
    waits: list[float] = field(default_factory=list)
    """Seconds from a request to the end of its prefill."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by engine."""

    @property
    def hit_rate(self) -> float:
        """In percent of the prompts' tokens."""
        return 100 * self.hit_tokens / self.asked_tokens


class Cache:
    """Chunks up to a number, with lmkv's default policy of eviction."""

    def __init__(self, capacity: int, policy: str) -> None:
        self._queue = EvictionQueue(POLICIES[policy]())
        self._capacity = capacity

    def use(self, keys: Sequence[ChunkKey]) -> int:
        """The number of leading chunks that are held."""
        held = list(itertools.takewhile(self._queue.__contains__, keys))
        self._queue.use(held, keys[len(held) :])
        return len(held)

    def store(self, keys: Sequence[ChunkKey]) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """The chunks that are new, and those that were evicted for them."""
        new: dict[ChunkKey, None] = {}
        evicted: dict[ChunkKey, None] = {}
        for parent, key in itertools.pairwise((None, *keys)):
            assert key is not None
            if key not in self._queue:
                if len(self._queue) == self._capacity:
                    victim = self._queue.pop()
                    if victim is None:
                        break
                    _move(victim, new, evicted)
                self._queue.add(key, parent)
                _move(key, evicted, new)
        return list(new), list(evicted)


def _move(key: ChunkKey, source: dict[ChunkKey, None], target: dict[ChunkKey, None]) -> None:
    """Adds a change, which cancels the opposite one."""
    if key in source:
        del source[key]
    else:
        target[key] = None


class LayoutView:
    """The layout map as the picker sees it."""

    def __init__(self) -> None:
        self._holders: dict[ChunkKey, set[str]] = {}

    def change(self, instance: str, new: Sequence[ChunkKey], evicted: Sequence[ChunkKey]) -> None:
        """Applies a report."""
        for key in new:
            self._holders.setdefault(key, set()).add(instance)
        for key in evicted:
            holders = self._holders[key]
            holders.discard(instance)
            if not holders:
                del self._holders[key]

    def matches(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """The number of leading chunks that each instance holds."""
        found: dict[str, int] = {}
        holders: set[str] | frozenset[str] = self._holders.get(keys[0], frozenset()) if keys else frozenset()
        for count, key in enumerate(keys[1:], 1):
            rest = holders & self._holders.get(key, frozenset())
            if len(rest) < len(holders):
                found |= dict.fromkeys(holders - rest, count)
            if not rest:
                return found
            holders = rest
        return found | dict.fromkeys(holders, len(keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrival:
    name: str
    seconds: float
    request: Request
    hit_count: int | None
    """If it is known on arrival."""
    queued: QueuedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The tokens per second that an engine computes, and a time in which it computes none."""

    tokens_per_second: float = PREFILL_RATE
    stalls_at: float = math.inf
    """In seconds since the begin of the replay."""
    stall_seconds: float = 0.0

    def end(self, begin: float, token_count: int) -> float:
        """The time at which a prompt is computed that begins then."""
        stall_end = self.stalls_at + self.stall_seconds
        if self.stalls_at <= begin < stall_end:
            begin = stall_end
        end = begin + token_count / self.tokens_per_second
        return end + self.stall_seconds if begin < self.stalls_at < end else end


class _SimulatedEngine:
    def __init__(self, engine: Engine, cache: Cache, pace: Pace) -> None:
        self.engine = engine
        self.cache = cache
        self.pace = pace
        self.waiting: deque[_Arrival] = deque()
        self.is_busy = False


class Fleet:
    """Simulated engines with one placement."""

    def __init__(
        self,
        trace: Trace,
        placement: str,
        engine_count: int,
        engine_tokens: int,
        *,
        policy: str,
        paces: Mapping[int, Pace] = MappingProxyType({}),
        other: OtherRouter | None = None,
    ) -> None:
        """`other` is for the placement `other`; it knows the engines by the ids `0`, `1`, ...

        `paces` has the pace of each engine that computes slower or faster than the others; the key is its number.
        """
        assert (placement == OTHER) == (other is not None)
        self._trace = trace
        self._placement = placement
        capacity = engine_tokens // trace.chunk_tokens
        shared = Cache(capacity * engine_count, policy) if placement == ORACLE else None
        self._engines: dict[Engine, _SimulatedEngine] = {}
        for number in range(engine_count):
            engine = Engine(f"http://{number}", BOTH)
            engine.instance_id = str(number)
            engine.mark_healthy()
            pace = paces.get(number, Pace())
            engine.queue.tokens_per_second = pace.tokens_per_second
            self._engines[engine] = _SimulatedEngine(engine, shared or Cache(capacity, policy), pace)
        name = {PICKER: "kv_aware", ROUND_ROBIN: "round_robin"}.get(placement, "least_loaded")
        self._pool = EnginePool(list(self._engines), cost_by(name), SessionAffinity(SESSION_TTL))
        self._view = LayoutView()
        self._other = other
        self._recent = RecentPicks()
        self._outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._now = 0.0

    def replay(self, sessions: Sequence[str], speed: float) -> Outcome:
        """Serves the trace, `speed` times as fast as it was recorded."""
        for request, session in zip(self._trace.requests, sessions, strict=True):
            self._at(request.arrival_seconds / speed, partial(self._arrive, request, session))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self._outcome

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (seconds, self._event_count, act))

    def _choose(self, name: str, request: Request, session: str) -> tuple[Engine, int]:
        """The engine, and the number of tokens that it has to compute, as it is known now."""
        if self._other:
            instance = self._other.choose(name, request.keys)
            return next(engine for engine in self._engines if engine.instance_id == instance), 0
        cached: Mapping[str, int] = {}
        if self._placement == PICKER:
            matches = self._view.matches(request.keys)
            for instance, count in self._recent.matches(b"".join(request.keys), self._now).items():
                matches[instance] = max(count, matches.get(instance, 0))
            cached = {instance: found_tokens(self._trace, request, count) for instance, count in matches.items()}
        affinity = session if self._placement == SESSIONS else ""
        engine = self._pool.choose(self._now, session=affinity, cached=cached, token_count=request.token_count)
        assert engine is not None
        return engine, HeldTokens(cached, request.token_count).uncached_by(engine)

    def _arrive(self, request: Request, session: str) -> None:
        name = str(self._outcome.counts.total())
        engine, uncached_count = self._choose(name, request, session)
        engine.in_flight_count += 1
        queued = engine.queue.add(uncached_count, self._now)
        queued.is_followed = True
        if self._placement == PICKER:
            self._recent.add(b"".join(request.keys), engine.instance_id, self._now)
        self._outcome.counts[engine.url] += 1
        simulated = self._engines[engine]
        hit_count: int | None = None
        if self._placement == ORACLE:
            hit_count = simulated.cache.use(request.keys)
            simulated.cache.store(request.stored)
        simulated.waiting.append(
            _Arrival(name=name, seconds=self._now, request=request, hit_count=hit_count, queued=queued)
        )
        self._start(simulated)

    def _start(self, simulated: _SimulatedEngine) -> None:
        if simulated.is_busy or not simulated.waiting:
            return
        simulated.is_busy = True
        arrival = simulated.waiting.popleft()
        request, hit_count = arrival.request, arrival.hit_count
        if hit_count is None:
            hit_count = simulated.cache.use(request.keys)
        hit = found_tokens(self._trace, request, hit_count)
        self._outcome.asked_tokens += request.token_count
        self._outcome.hit_tokens += hit
        end = simulated.pace.end(self._now, request.token_count - hit)
        self._outcome.waits.append(end - arrival.seconds)
        self._at(end, lambda: self._computed(simulated, arrival))

    def _computed(self, simulated: _SimulatedEngine, arrival: _Arrival) -> None:
        simulated.is_busy = False
        engine = simulated.engine
        engine.queue.remove(arrival.queued, self._now)
        new, evicted = simulated.cache.store(arrival.request.stored)
        change = self._other.change if self._other else self._view.change
        if self._placement in (PICKER, OTHER):
            self._at(self._now + REPORT_SECONDS, lambda: change(engine.instance_id, new, evicted))
        if self._other:
            self._other.computed(arrival.name)
        self._at(self._now + arrival.request.answer_tokens / ANSWER_RATE, lambda: self._answered(engine, arrival.name))
        self._start(simulated)

    def _answered(self, engine: Engine, name: str) -> None:
        engine.in_flight_count -= 1
        if self._other:
            self._other.answered(name)


def sessions_of(trace: Trace) -> list[str]:
    """The session of each request, as its prompt shows it: a request continues the session whose chunks it repeats."""
    uses = Counter(key for request in trace.requests for key in request.keys)
    limit = SHARED_FRACTION * len(trace.requests)
    owners: dict[ChunkKey, str] = {}
    sessions = []
    for number, request in enumerate(trace.requests):
        own = [key for key in request.keys if uses[key] <= limit]
        session = ""
        for key in own:
            if key not in owners:
                break
            session = owners[key]
        session = session or str(number)
        sessions.append(session)
        for key in own:
            owners.setdefault(key, session)
    return sessions
