"""The state of one engine, as the proxy knows it. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""Roles of engines."""
MAX_HEALTH_TIMEOUTS = 3
"""Consecutive health checks without a response after which an engine is unhealthy. A busy engine may miss one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """A model or adapter that an engine serves."""

    name: str
    parent: str = ""
    """The base model of an adapter; empty for a base model."""
    max_token_count: int = 0
    """Maximum number of tokens of a prompt and its completion; 0 if the engine does not report it."""


MAX_SAMPLES = 1_000
"""Times to a first token that are kept for each engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHits:
    """Tokens of prompts since the engine's start, as its metrics count them.

    Without those that prefill engines have computed for it: whether they were hits is in the metrics of these engines.
    """

    asked_tokens: float
    own_tokens: float
    """Tokens of these that were in the engine's own prefix cache."""
    external_tokens: float
    """Tokens of these that its connector loaded."""


class Engine:
    """One engine: its health, its models, its instance, its load and its latencies."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.is_healthy = False
        self.failure = "no health check has completed yet"
        """Why it is unhealthy; empty if it is healthy."""
        self.models: tuple[EngineModel, ...] = ()
        self.instance_id = ""
        """The instance that stores its chunks; empty if the engine does not report one."""
        self.missing_paths: set[str] = set()
        """Paths that requests since the last probe have shown to be missing."""
        self.hits: PrefixHits | None = None
        """Its prefix hits as its metrics state them; None if it does not expose them."""
        self.first_token_seconds: deque[float] = deque(maxlen=MAX_SAMPLES)
        """Times from a request to the first token of a stream, or to the response of a prefill."""
        self.in_flight_count = 0
        self.handoff_count = 0
        """Handoffs that it has sent and the decode engine may still read from its node."""
        self.is_draining = False
        """Whether it gets no new requests, and leaves after its last one."""
        self.last_choice = 0
        """Number of the pool's last choice that selected it."""
        self._health_timeout_count = 0

    @property
    def is_available(self) -> bool:
        """Whether new requests may use it."""
        return self.is_healthy and not self.is_draining

    @property
    def is_busy(self) -> bool:
        """Whether a request needs it."""
        return self.in_flight_count > 0 or self.handoff_count > 0

    @property
    def unavailable_reason(self) -> str:
        """Why no new request may use it; empty if one may."""
        return self.failure or ("it is draining" if self.is_draining else "")

    def model(self, name: object) -> EngineModel:
        """The model of this name; the engine's first model if `name` is not one of them."""
        found = [model for model in self.models if model.name == name] or list(self.models[:1])
        return found[0] if found else EngineModel(name=name if isinstance(name, str) else "")

    def mark_healthy(self) -> None:
        """Makes it available to requests."""
        self.is_healthy, self.failure, self._health_timeout_count = True, "", 0

    def mark_unhealthy(self, failure: str) -> bool:
        """Excludes it from requests until it is healthy. Returns whether its state or the failure has changed."""
        has_changed = self.is_healthy or failure != self.failure
        self.is_healthy, self.failure = False, failure
        return has_changed

    def reset_health_timeouts(self) -> None:
        """Records that it responded to a health check."""
        self._health_timeout_count = 0

    def add_health_timeout(self) -> bool:
        """Records a health check without a response. Returns whether the number of consecutive ones is the limit."""
        self._health_timeout_count += 1
        return self._health_timeout_count >= MAX_HEALTH_TIMEOUTS

    def time_first_token(self, has_token: Callable[[], bool]) -> Callable[[], None]:
        """Starts to time a request. To be called after each event: records the first one that `has_token`."""
        begin = time.perf_counter()
        is_recorded = False

        def check() -> None:
            nonlocal is_recorded
            if not is_recorded and has_token():
                is_recorded = True
                self.first_token_seconds.append(time.perf_counter() - begin)

        return check

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Counts a request as in flight."""
        self.in_flight_count += 1
        try:
            yield
        finally:
            self.in_flight_count -= 1
