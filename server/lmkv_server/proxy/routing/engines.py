"""What the proxy knows of each engine, and which engine takes a request. No IO."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lmkv_server.proxy.routing.affinity import Sessions
from lmkv_server.proxy.routing.policies import Cost

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""What an engine is for."""
MAX_SILENCES = 3
"""Health checks in a row that may pass without an answer: a busy engine is slow, a frozen one stays silent."""
OVERLOAD = 8
"""Requests in flight, beyond those of the least loaded engine, from which on a session leaves its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model as an engine serves it."""

    name: str
    parent: str = ""
    """The model that this is an adapter of; empty if it is none."""
    max_token_count: int = 0
    """Most tokens of a prompt and its answer; 0 if the engine does not say."""


class Engine:
    """One engine: how it is, what it serves, how busy it is."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.is_healthy = False
        self.trouble = "it has not been asked yet"
        """Why it is out; empty if it is not."""
        self.models: tuple[Model, ...] = ()
        self.instance_id = ""
        """Which instance its chunks are in; empty if it did not say."""
        self.in_flight_count = 0
        self.last_turn = 0
        """When it was chosen last, counted in choices."""
        self._silence_count = 0

    def learn(self, instance_id: str) -> None:
        """Takes what the engine says of its node."""
        self.instance_id = instance_id

    def model(self, name: object) -> Model:
        """The model of this name; without one, or if it is not known, the first."""
        found = [model for model in self.models if model.name == name] or list(self.models[:1])
        return found[0] if found else Model(name=name if isinstance(name, str) else "")

    def admit(self) -> None:
        """It is well again."""
        self.is_healthy, self.trouble, self._silence_count = True, "", 0

    def heard(self) -> None:
        """It answered a health check."""
        self._silence_count = 0

    def silent(self) -> bool:
        """It did not answer a health check in time. Returns whether that was once too often."""
        self._silence_count += 1
        return self._silence_count >= MAX_SILENCES

    def exclude(self, trouble: str) -> bool:
        """No request goes to it until it is admitted. Returns whether that is news, or the reason is."""
        is_news = self.is_healthy or trouble != self.trouble
        self.is_healthy, self.trouble = False, trouble
        return is_news

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request that it has in flight."""
        self.in_flight_count += 1
        try:
            yield
        finally:
            self.in_flight_count -= 1


class Pool:
    """The engines of one role, and who of them takes a request: a session's engine, else the one of least cost."""

    def __init__(self, engines: Sequence[Engine], cost: Cost, sessions: Sessions) -> None:
        self.engines = engines
        self._cost = cost
        self._sessions = sessions
        self._turn = 0

    def choose(
        self, now: float, *, session: str = "", held: Mapping[str, int], excluded: Collection[Engine] = ()
    ) -> Engine | None:
        """A healthy engine that is not excluded, and remembers that the session is there; None if there is none.

        `held` is how many tokens of the prompt each instance holds. Of engines that cost the same, the one takes it
        that was not chosen for longest.
        """
        candidates = [engine for engine in self.engines if engine.is_healthy and engine not in excluded]
        if not candidates:
            return None
        chosen = self._of_session(session, candidates, now) or min(
            candidates, key=lambda engine: (self._cost(engine, held), engine.last_turn)
        )
        self._turn += 1
        chosen.last_turn = self._turn
        if session:
            self._sessions.remember(session, chosen.url, now)
        return chosen

    def least_loaded(self) -> Engine | None:
        """The healthy engine with the fewest requests in flight, for a question that all answer alike."""
        healthy = (engine for engine in self.engines if engine.is_healthy)
        return min(healthy, key=lambda engine: engine.in_flight_count, default=None)

    def _of_session(self, session: str, candidates: Sequence[Engine], now: float) -> Engine | None:
        url = self._sessions.recall(session, now) if session else None
        least = min(engine.in_flight_count for engine in candidates)
        fit = (engine for engine in candidates if engine.url == url and engine.in_flight_count < least + OVERLOAD)
        return next(fit, None)


class Fleet:
    """All engines: those that decode, or do everything, and those that only prefill, if there are such."""

    def __init__(self, decode: Pool, prefill: Pool | None) -> None:
        self.decode = decode
        self.prefill = prefill

    @property
    def engines(self) -> list[Engine]:
        """All of them, in the order in which a request meets them."""
        return [*(self.prefill.engines if self.prefill else ()), *self.decode.engines]

    def missing(self) -> str:
        """Why no request can be answered; empty if one can. Without prefill engines those that decode do it all."""
        if self.decode.least_loaded() is not None:
            return ""
        return "; ".join(f"{engine.role} engine {engine.url}: {engine.trouble}" for engine in self.decode.engines)
