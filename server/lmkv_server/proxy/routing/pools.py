"""Selects the engine of a request: session affinity first, then the policy's cost. Pure: time is passed in.

Requests of one session may follow each other faster than an engine computes a prompt. So that they are not spread over
engines that each compute it, a pick counts as what the engine will hold soon.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lmkv.keys import KEY_BYTES
from lmkv_server.proxy.engine import PREFILL, Engine
from lmkv_server.proxy.routing.replicas import KnownPrompt, Relief, Replicas

TTL_SECONDS = 30.0
"""Time after which the layout map has what an engine stored; a request may also have failed."""
MAX_KEYS = 500_000
"""Maximum number of keys that are kept, about 60 MB. New keys replace the oldest."""


class RecentPicks:
    """The last instance that each chunk's prompt was routed to. Time is passed in."""

    def __init__(self, ttl_seconds: float = TTL_SECONDS, max_keys: int = MAX_KEYS) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_keys = max_keys
        self._picks: deque[tuple[float, str, bytes]] = deque()
        """Expiry, instance and keys, oldest first."""
        self._instances: dict[bytes, tuple[str, float]] = {}
        """Instance and expiry by key."""
        self._key_count = 0

    def add(self, keys: bytes, instance_id: str, now: float) -> None:
        """Records that a prompt with these chunks, 16 bytes each, was routed to an instance."""
        pick = (instance_id, now + self._ttl_seconds)
        self._picks.append((pick[1], instance_id, keys))
        self._key_count += len(keys) // KEY_BYTES
        self._instances.update(dict.fromkeys(_split(keys), pick))
        while self._picks and (self._picks[0][0] <= now or self._key_count > self._max_keys):
            self._drop_oldest()

    def matches(self, keys: bytes, now: float) -> Mapping[str, int]:
        """The number of leading chunks that instances will hold: of the one that the prompt's begin was routed to."""
        found: str | None = None
        count = 0
        for key in _split(keys):
            instance_id, expiry = self._instances.get(key, (None, 0.0))
            if instance_id is None or expiry <= now:
                break
            count += 1
            found = instance_id  # the last one: earlier chunks may be shared with prompts elsewhere
        return {found: count} if found is not None else {}

    def _drop_oldest(self) -> None:
        expiry, instance_id, keys = self._picks.popleft()
        self._key_count -= len(keys) // KEY_BYTES
        for key in _split(keys):
            if self._instances.get(key) == (instance_id, expiry):
                del self._instances[key]


def _split(keys: bytes) -> list[bytes]:
    split: list[bytes] = np.frombuffer(keys, f"V{KEY_BYTES}").tolist()  # a fifth of the time of slices
    return split


class HeldTokens(dict[str, int]):
    """The number of leading tokens that instances hold of a prompt of `token_count` tokens; 0: not known."""

    def __init__(
        self, held: Mapping[str, int] = MappingProxyType({}), token_count: int = 0, prompt: KnownPrompt | None = None
    ) -> None:
        super().__init__(held)
        self.token_count = token_count
        self.prompt = prompt
        """Until an engine is chosen, if a copy of it may be made."""

    def uncached_by(self, engine: Engine) -> int:
        """Tokens that the engine has to compute."""
        return max(0, self.token_count - self.get(engine.instance_id, 0))


HOLD_FACTOR = 4
"""A prompt is worth a wait of this multiple of what computing it takes, at an engine that holds it: what is computed
twice takes memory from other prompts, which are computed again then. From 1 to 10 the simulated TTFT of recorded
conversations hardly rises; with 4, nearly as many tokens hit as without regard to load."""
REQUEST_TOKENS = 64
"""A request in flight counts as this number of queued tokens: it shares the steps of a prompt while it decodes."""
TURNOVER_EXPONENT = 0.25
"""How much more memory a token costs where more tokens were computed lately. Without it faster engines get more
prompts than they can remember, while others hold what is not asked for; with more, slow ones get too many."""
TURNOVER_TOKENS = 20_000
"""Added to the tokens of each engine, so that the first prompts do not decide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Tokens of a prompt that an engine does not hold."""

    token_count: int
    pullable_count: int = 0
    """Tokens of these that its node could fetch from a peer."""


def missing_at(engine: Engine, held: Mapping[str, int], token_count: int) -> Missing:
    """What an engine does not hold of a prompt of `token_count` tokens, of which instances hold `held`."""
    own = held.get(engine.instance_id, 0)
    pullable_count = max(held.values(), default=own) - own
    return Missing(token_count=token_count - own, pullable_count=max(0, pullable_count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Usual:
    """Means of the engines that may be chosen."""

    tokens_per_second: float
    recent_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a prompt is expected to cost at an engine, in seconds."""

    wait: float
    """For other prompts."""
    prompt: float
    """To fetch and compute what the engine does not hold, after that."""
    memory: float
    """Worth of the memory that this takes."""


def expect(engine: Engine, missing: Missing, now: float, usual: Usual) -> Expected:
    """What a prompt costs at an engine."""
    queue = engine.queue
    rate = queue.tokens_per_second or usual.tokens_per_second
    wait = (queue.tokens_ahead(now) + REQUEST_TOKENS * engine.in_flight_count) / rate
    seconds = wait + missing.token_count / rate
    if queue.pulled_per_second:  # while the prompt waits for others, a fetch costs nothing
        fetched = max(wait, missing.pullable_count / queue.pulled_per_second)
        seconds = min(seconds, fetched + (missing.token_count - missing.pullable_count) / rate)
    turnover = (queue.recent_tokens(now) + TURNOVER_TOKENS) / (usual.recent_tokens + TURNOVER_TOKENS)
    memory = HOLD_FACTOR * missing.token_count / usual.tokens_per_second
    return Expected(wait=wait, prompt=seconds - wait, memory=memory * math.pow(turnover, TURNOVER_EXPONENT))


Cost = Callable[[Engine, Missing, float, Usual], float]
"""Cost of an engine, given the tokens that it does not hold, the time, and what is usual. The engine of least cost
serves; it does not rise if fewer tokens are missing, or if more of them could be fetched."""


def cost_by(policy: str) -> Cost:
    """The cost function of a policy. That of `kv_aware` is the expected time to the first token, and what the memory
    costs that the prompt takes."""

    def round_robin(_: Engine, __: Missing, ___: float, ____: Usual) -> float:
        return 0

    def least_loaded(engine: Engine, _: Missing, __: float, ___: Usual) -> float:
        return engine.in_flight_count

    def kv_aware(engine: Engine, missing: Missing, now: float, usual: Usual) -> float:
        expected = expect(engine, missing, now, usual)
        return expected.wait + expected.prompt + expected.memory

    return {"round_robin": round_robin, "least_loaded": least_loaded, "kv_aware": kv_aware}[policy]


MAX_SESSIONS = 100_000
"""A new session beyond this number replaces the least recently used one."""


class SessionAffinity:
    """Maps sessions to engine URLs. An entry expires `ttl_seconds` after the session's last request."""

    def __init__(self, ttl_seconds: float, limit: int = MAX_SESSIONS) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()  # URL and expiry, in order of last use

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, session: str, now: float) -> str | None:
        """The URL of the session's engine; None if it has none or its entry has expired."""
        url, expiry = self._entries.get(session, (None, 0.0))
        return url if now < expiry else None

    def assign(self, session: str, url: str, now: float) -> None:
        """Assigns the session to an engine, and removes expired entries."""
        if self._ttl_seconds <= 0:
            return
        self._entries[session] = (url, now + self._ttl_seconds)
        self._entries.move_to_end(session)
        while len(self._entries) > self._limit or next(iter(self._entries.values()))[1] <= now:
            self._entries.popitem(last=False)


OVERLOAD = 8
"""A session leaves its engine if that has this many more requests in flight than the least loaded engine."""


class EnginePool:
    """The engines of one role, and a `reserve` of others that is used only while no engine of the role can be."""

    def __init__(
        self, engines: list[Engine], cost: Cost, affinity: SessionAffinity, *, reserve: Sequence[Engine] = ()
    ) -> None:
        self.engines = engines
        self.replicas: Replicas | None = None
        """Makes copies of prompts for which requests wait."""
        self._reserve = reserve
        self._cost = cost
        self._affinity = affinity
        self._choice_count = 0

    def choose(
        self,
        now: float,
        *,
        session: str = "",
        cached: Mapping[str, int],
        token_count: int = 0,
        excluded: Collection[Engine] = (),
    ) -> Engine | None:
        """Selects an available engine that is not excluded, and assigns the session to it; None if there is none.

        `cached` is the number of prompt tokens that each instance holds, of `token_count`. Among engines of equal cost,
        selects the one that was selected least recently.
        """
        candidates = self._candidates(excluded)
        if not candidates:
            return None
        rank = self._ranking(candidates, token_count, now)
        chosen = self._of_session(session, candidates, now) or min(candidates, key=lambda engine: rank(engine, cached))
        self._choice_count += 1
        chosen.last_choice = self._choice_count
        if session:
            self._affinity.assign(session, chosen.url, now)
        return chosen

    def consider_copy(self, now: float, chosen: Engine, held: HeldTokens, excluded: Collection[Engine] = ()) -> None:
        """Has `replicas` know of a prompt that waits at `chosen` since no other engine holds as much of it.

        To be called after `choose`, before the engine has the prompt. Ends what `held` knows of the prompt.
        """
        prompt, held.prompt = held.prompt, None
        most = max(held.values(), default=0)
        if self.replicas is None or prompt is None or not most or held.get(chosen.instance_id, 0) < most:
            return
        candidates = self._candidates(excluded)
        others = [one for one in candidates if one.instance_id and held.get(one.instance_id, 0) < most]
        if not others:
            return
        usual = self._usual(candidates, now)

        def seconds(engine: Engine) -> float:
            expected = expect(engine, Missing(token_count=held.token_count - most), now, usual)
            return expected.wait + expected.prompt

        other = min(others, key=seconds)
        saved = seconds(chosen) - seconds(other)
        if saved <= 0:
            return
        of_token = expect(other, Missing(token_count=1, pullable_count=1), now, usual)
        pull = 1 / other.queue.pulled_per_second if other.queue.pulled_per_second else 0.0
        relief = Relief(
            instance_id=other.instance_id,
            source=chosen.instance_id,
            seconds=saved,
            held_count=most,
            own_count=held.get(other.instance_id, 0),
            tokens_per_second=other.queue.tokens_per_second or usual.tokens_per_second,
            cost_per_token=of_token.memory + pull,
        )
        self.replicas.consider(prompt, relief, now)

    def is_certain(
        self,
        now: float,
        *,
        session: str = "",
        cached: Mapping[str, int],
        at_most: Mapping[str, int],
        token_count: int = 0,
        excluded: Collection[Engine] = (),
    ) -> bool:
        """Whether `choose` selects the same engine whatever each instance holds, from `cached` to `at_most` tokens."""
        candidates = self._candidates(excluded)
        if not candidates or self._of_session(session, candidates, now):
            return True
        rank = self._ranking(candidates, token_count, now)
        chosen = min(candidates, key=lambda engine: rank(engine, cached))
        least = rank(chosen, cached)
        return all(least < rank(engine, at_most) for engine in candidates if engine is not chosen)

    def least_loaded(self) -> Engine | None:
        """The available engine with the fewest requests in flight; None if none is available."""
        return min(self._candidates(()), key=lambda engine: engine.in_flight_count, default=None)

    def _candidates(self, excluded: Collection[Engine]) -> list[Engine]:
        def fit(engines: Sequence[Engine]) -> list[Engine]:
            return [engine for engine in engines if engine.is_available and engine not in excluded]

        return fit(self.engines) or fit(self._reserve)

    def _ranking(
        self, candidates: Sequence[Engine], token_count: int, now: float
    ) -> Callable[[Engine, Mapping[str, int]], tuple[float, int]]:
        """The rank of an engine: that of the least one is chosen. It does not rise if an instance holds more."""
        usual = self._usual(candidates, now)

        def rank(engine: Engine, cached: Mapping[str, int]) -> tuple[float, int]:
            return self._cost(engine, missing_at(engine, cached, token_count), now, usual), engine.last_choice

        return rank

    def _usual(self, candidates: Sequence[Engine], now: float) -> Usual:
        rates = [rate for engine in candidates if (rate := engine.queue.tokens_per_second)]
        return Usual(
            tokens_per_second=sum(rates) / len(rates) if rates else 1.0,
            recent_tokens=sum(engine.queue.recent_tokens(now) for engine in candidates) / len(candidates),
        )

    def expectations(
        self, now: float, held: Mapping[str, int], token_count: int
    ) -> tuple[Mapping[Engine, Expected], Engine | None]:
        """What a prompt costs at each engine that may be chosen, and the engine of least cost; a session may differ."""
        candidates = self._candidates(())
        if not candidates:
            return {}, None
        usual, rank = self._usual(candidates, now), self._ranking(candidates, token_count, now)
        found = {one: expect(one, missing_at(one, held, token_count), now, usual) for one in candidates}
        return found, min(candidates, key=lambda engine: rank(engine, held))

    def _of_session(self, session: str, candidates: Sequence[Engine], now: float) -> Engine | None:
        url = self._affinity.get(session, now) if session else None
        least = min(engine.in_flight_count for engine in candidates)
        fit = (engine for engine in candidates if engine.url == url and engine.in_flight_count < least + OVERLOAD)
        return next(fit, None)


class EnginePools:
    """All engines: those that decode or do both, and those that only prefill, if there are any.

    The prefill engines are the reserve of `decode`.
    """

    def __init__(self, decode: EnginePool, prefill: EnginePool | None) -> None:
        self.decode = decode
        self.prefill = prefill
        self.engines: list[Engine] = []
        """All engines, prefill engines first. The same list after changes."""
        self._list()

    def add(self, engine: Engine) -> None:
        """Adds an engine to the pool of its role."""
        self._pool_of(engine).engines.append(engine)
        self._list()

    def remove(self, engine: Engine) -> None:
        """Removes an engine from the pool of its role."""
        self._pool_of(engine).engines.remove(engine)
        self._list()

    def _pool_of(self, engine: Engine) -> EnginePool:
        return self.prefill if self.prefill is not None and engine.role == PREFILL else self.decode

    def _list(self) -> None:
        self.engines[:] = [*(self.prefill.engines if self.prefill else ()), *self.decode.engines]

    def unavailable_reason(self) -> str:
        """Says why no request can be served; empty if an engine of either role can serve one, which it can do alone."""
        if self.decode.least_loaded() is not None:
            return ""
        reasons = (f"{engine.role} engine {engine.url}: {engine.unavailable_reason}" for engine in self.engines)
        return "; ".join(reasons) or "there is no engine"
