"""One simulated engine that serves a recorded trace, whose hits are all behind a link: loaded, computed, or as decided.

The product's own classes decide, and are asked where the product asks them: at the lookup by the bandwidth
of the source and what is queued there (`lmkv.transfer.bandwidth`), when the engine has room for the request by earlier
loads, and at every step while a load waits by its pace (`lmkv_client.engine.speeds`). The engine computes one prompt at
a time, in the order of their arrival; it looks at the others when it has computed one, as an engine whose steps are
full does, and begins their loads then. Loads that run at once share the link evenly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.replay.fleet import PREFILL_RATE, Cache
from benchmarks.replay.traces import Request, Trace, found_tokens
from lmkv.transfer.bandwidth import Bandwidth
from lmkv_client.engine.speeds import LoadCosts, PrefillQueue, PrefillRate, is_too_late, seconds_left

LOAD, COMPUTE, DECIDED = "always_load", "always_compute", "lmkv"
POLICIES = (LOAD, COMPUTE, DECIDED)
TOKEN_BYTES = 128 << 10
"""A model with 8 B parameters has this many in bfloat16."""
STORE_TOKENS = 8_000_000
"""The source holds this many tokens; those that were used least recently leave it first."""
STEP_SECONDS = 0.1
"""Time between two judgements of a load that waits."""
LEAST_STEP_TOKENS = 256


@dataclass(kw_only=True, eq=False, slots=True)
class _Prompt:
    """A request that is not computed yet."""

    name: str
    request: Request
    arrived_at: float
    hit_count: int
    """Tokens that the source holds and the lookup has not refused."""
    is_decided: bool = False
    loaded_count: int = 0
    """Tokens that have been loaded."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Load:
    prompt: _Prompt
    size_bytes: float
    began_at: float
    left_bytes: float

    @property
    def arrived_count(self) -> int:
        return round((self.size_bytes - self.left_bytes) / TOKEN_BYTES)

    @property
    def missing_count(self) -> int:
        return round(self.left_bytes / TOKEN_BYTES)


class _Link:
    """Loads that share a source evenly."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self.loads: list[_Load] = []
        self._now = 0.0

    @property
    def left_bytes(self) -> float:
        return sum(load.left_bytes for load in self.loads)

    @property
    def next_end(self) -> float:
        """When the next load ends, if no other one begins or ends before."""
        least = min((load.left_bytes for load in self.loads), default=math.inf)
        return self._now + least * len(self.loads) / self._bytes_per_second

    def move(self, now: float) -> list[_Load]:
        """Brings what comes up to this time; the loads that have ended."""
        ended: list[_Load] = []
        while self.loads and self._now < now:
            until = min(now, self.next_end)
            moved_bytes = (until - self._now) * self._bytes_per_second / len(self.loads)
            self._now = until
            for load in list(self.loads):
                load.left_bytes -= moved_bytes
                if load.left_bytes < 1:
                    load.left_bytes = 0.0
                    self.loads.remove(load)
                    ended.append(load)
        self._now = now
        return ended


@dataclass(kw_only=True, slots=True)
class LoadingOutcome:
    """The result of simulating a trace."""

    waits: list[float] = field(default_factory=list)
    """Seconds from each request to the end of its prefill."""
    asked_tokens: int = 0
    held_tokens: int = 0
    """Tokens of these that the source held."""
    loaded_tokens: int = 0
    abandoned_tokens: int = 0

    @property
    def loaded_rate(self) -> float:
        """In percent of the tokens that the source held."""
        return 100 * self.loaded_tokens / max(1, self.held_tokens)


class LoadingEngine:
    """The engine, its link, and what decides."""

    def __init__(self, trace: Trace, bytes_per_second: float, policy: str) -> None:
        self._trace = trace
        self._policy = policy
        self._store = Cache(STORE_TOKENS // trace.chunk_tokens, "lru")
        self._link = _Link(bytes_per_second)
        self._bandwidth = Bandwidth()
        self._costs = LoadCosts()
        self._prefill = PrefillRate(LEAST_STEP_TOKENS)
        self._queue = PrefillQueue()
        self._waiting: list[_Prompt] = []
        self._is_busy = False
        self._is_judging = False
        self._outcome = LoadingOutcome()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._now = 0.0

    def replay(self, requests: Sequence[Request], speed: float) -> LoadingOutcome:
        """Serves the requests, `speed` times as fast as they were recorded."""
        for number, request in enumerate(requests):
            self._at(request.arrival_seconds / speed, partial(self._arrive, str(number), request))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        assert not self._waiting
        return self._outcome

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (seconds, self._event_count, act))

    def _computing_seconds(self, name: str, token_count: int) -> float:
        return self._queue.seconds(name, token_count, self._prefill.tokens_per_second, self._now)

    def _arrive(self, name: str, request: Request) -> None:
        self._follow_link()
        held_count = min(found_tokens(self._trace, request, self._store.use(request.keys)), request.token_count - 1)
        self._outcome.asked_tokens += request.token_count
        self._outcome.held_tokens += held_count
        self._queue.add(name, request.token_count, self._now)
        hit_count = 0 if self._policy == COMPUTE or self._is_refused(name, held_count) else held_count
        self._waiting.append(_Prompt(name=name, request=request, arrived_at=self._now, hit_count=hit_count))
        self._look_at_waiting()

    def _is_refused(self, name: str, hit_count: int) -> bool:
        """Whether the node leaves a hit out at the lookup."""
        expected_seconds = self._bandwidth.seconds(hit_count * TOKEN_BYTES + self._link.left_bytes, self._now)
        computing_seconds = self._computing_seconds(name, hit_count)
        if self._policy != DECIDED or not computing_seconds or expected_seconds is None:
            return False
        return expected_seconds > computing_seconds

    def _look_at_waiting(self) -> None:
        """Begins loads, and computes the first prompt that waits for none."""
        if self._is_busy:
            return
        loading = {load.prompt for load in self._link.loads}
        for prompt in self._waiting:
            if not prompt.is_decided:
                prompt.is_decided = True
                if self._begins_load(prompt):
                    continue
            elif prompt in loading:
                continue
            self._compute(prompt)
            return

    def _begins_load(self, prompt: _Prompt) -> bool:
        count = prompt.hit_count
        if self._policy == DECIDED:
            seconds = self._computing_seconds(prompt.name, count)
            count = self._costs.choose(0, count, round(count / seconds) if seconds else 0)
        if not count:
            return False
        self._queue.expect(prompt.name, prompt.request.token_count - count)
        size = float(count * TOKEN_BYTES)
        self._link.loads.append(_Load(prompt=prompt, size_bytes=size, began_at=self._now, left_bytes=size))
        self._await_link()
        if self._policy == DECIDED and not self._is_judging:
            self._is_judging = True
            self._at(self._now + STEP_SECONDS, self._judge)
        return True

    def _await_link(self) -> None:
        if self._link.loads:
            self._at(self._link.next_end, self._follow_link)

    def _judge(self) -> None:
        """Abandons what comes later than it would be computed."""
        self._follow_link()
        for load in list(self._link.loads):
            waited, arrived, missing = self._now - load.began_at, load.arrived_count, load.missing_count
            seconds = self._computing_seconds(load.prompt.name, missing)
            steady_seconds = seconds_left(waited, arrived, missing) if arrived else 0.0
            if seconds and is_too_late(waited, arrived, missing, seconds, steady_seconds):
                self._costs.fetched.add(arrived + missing, waited + seconds_left(waited, arrived, missing))
                self._outcome.abandoned_tokens += missing
                self._link.loads.remove(load)
                self._end(load)
        self._await_link()
        self._is_judging = bool(self._link.loads)
        if self._is_judging:
            self._at(self._now + STEP_SECONDS, self._judge)
        self._look_at_waiting()

    def _follow_link(self) -> None:
        """Ends the loads that are there by now."""
        ended = self._link.move(self._now)
        for load in ended:
            if len(self._waiting) == 1 and not self._is_busy:  # steps of others would count as its time
                self._costs.fetched.add(load.arrived_count, self._now - load.began_at)
            self._end(load)
        if ended:
            self._await_link()
            self._look_at_waiting()

    def _end(self, load: _Load) -> None:
        load.prompt.loaded_count = load.arrived_count
        self._outcome.loaded_tokens += load.arrived_count
        busy = self._bandwidth.busy(load.began_at, self._now)
        self._bandwidth.record_read(round(load.size_bytes - load.left_bytes), busy.seconds, self._now, busy.share)

    def _compute(self, prompt: _Prompt) -> None:
        self._is_busy = True
        self._waiting.remove(prompt)
        count = prompt.request.token_count - prompt.loaded_count
        self._queue.expect(prompt.name, count)
        self._queue.planned({prompt.name: count})
        self._at(self._now + count / PREFILL_RATE, partial(self._computed, prompt, count))

    def _computed(self, prompt: _Prompt, count: int) -> None:
        self._is_busy = False
        self._prefill.add(count, count / PREFILL_RATE)
        self._outcome.waits.append(self._now - prompt.arrived_at)
        self._store.store(prompt.request.stored)
        self._follow_link()
        self._look_at_waiting()
