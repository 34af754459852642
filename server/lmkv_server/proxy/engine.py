"""The state of one engine, as the proxy knows it. Pure."""

from __future__ import annotations

import math
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
    prefill_seconds: float = 0.0
    """Time in which its requests computed their prompts; of those that were computed at once, each counts."""
    pulled_tokens: float = 0.0
    """Tokens of these that its node has fetched from peers."""
    pull_seconds: float = 0.0
    """Time that these fetches took; of those that ran at once, each counts."""

    @property
    def computed_tokens(self) -> float:
        return self.asked_tokens - self.own_tokens - self.external_tokens


@dataclass(kw_only=True, eq=False, slots=True)
class QueuedPrompt:
    """A prompt that an engine was given."""

    token_count: int
    """Tokens that it has to compute."""
    is_followed: bool = False
    """Whether its first token will be seen; until then it counts, however long that takes."""


TURNOVER_SECONDS = 300.0
"""Time after which a third of a prompt still counts as what an engine was given lately."""


class PromptQueue:
    """The prompts that an engine was given and has not computed, in their order. Pure: time is passed in."""

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        """Speed at which the engine computes prompts; 0 if that is not known."""
        self.pulled_per_second = 0.0
        """How many tokens per second its node fetches from peers; 0 if none has been measured."""
        self._recent_tokens = 0.0
        self._recent_at = 0.0
        self._prompts: dict[QueuedPrompt, None] = {}
        self._token_count = 0
        self._begun_at = 0.0
        """When it began with the first one."""

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, token_count: int, now: float) -> QueuedPrompt:
        """The engine is given a prompt of which it has to compute this number of tokens."""
        self._drain(now)
        if not self._prompts:
            self._begun_at = now
        prompt = QueuedPrompt(token_count=token_count)
        self._recent_tokens, self._recent_at = self.recent_tokens(now) + token_count, now
        self._prompts[prompt] = None
        self._token_count += token_count
        return prompt

    def remove(self, prompt: QueuedPrompt, now: float) -> None:
        """The prompt is computed, or its request is over. Idempotent."""
        self._drain(now)
        if prompt in self._prompts:
            is_first = prompt is next(iter(self._prompts))
            self._drop(prompt)
            if is_first:
                self._begun_at = now

    def recent_tokens(self, now: float) -> float:
        """Tokens that it was given to compute, and so to keep, each the less, the longer ago that was."""
        return self._recent_tokens * math.exp((self._recent_at - now) / TURNOVER_SECONDS)

    def tokens_ahead(self, now: float) -> float:
        """Tokens that a new prompt waits for. Of one that is overdue, as many as could have been computed meanwhile:
        the longer an engine is silent, the longer it is silent still."""
        self._drain(now)
        if not self._prompts:
            return 0.0
        first = next(iter(self._prompts)).token_count
        done = max(0.0, now - self._begun_at) * self.tokens_per_second
        return self._token_count - first + abs(first - done)

    def _drain(self, now: float) -> None:
        """Removes the prompts whose first token will not be seen, when they should be computed."""
        while self._prompts and self.tokens_per_second:
            first = next(iter(self._prompts))
            end = self._begun_at + first.token_count / self.tokens_per_second
            if first.is_followed or end > now:
                return
            self._drop(first)
            self._begun_at = end

    def _drop(self, prompt: QueuedPrompt) -> None:
        del self._prompts[prompt]
        self._token_count -= prompt.token_count


class Engine:
    """One engine: its health, its models, its instance, its load and its latencies."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.is_healthy = False
        self.failure = "no health check has completed yet"
        """The reason why it is unhealthy; empty if it is healthy."""
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
        self.queue = PromptQueue()
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
        """The reason why no new request may use it; empty if requests may."""
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
        """Records a health check without a response. Returns whether there are too many in a row now."""
        self._health_timeout_count += 1
        return self._health_timeout_count >= MAX_HEALTH_TIMEOUTS

    def take_hits(self, hits: PrefixHits | None) -> None:
        """Takes what its metrics state, and how fast it has computed and fetched prompts since they were read last."""
        before = self.hits or PrefixHits(asked_tokens=0, own_tokens=0, external_tokens=0)
        self.hits = hits
        if hits is None:
            return
        seconds = hits.prefill_seconds - before.prefill_seconds
        tokens = hits.computed_tokens - before.computed_tokens
        if seconds > 0 and tokens > 0:
            self.queue.tokens_per_second = tokens / seconds
        seconds = hits.pull_seconds - before.pull_seconds
        tokens = hits.pulled_tokens - before.pulled_tokens
        if seconds > 0 and tokens > 0:
            self.queue.pulled_per_second = tokens / seconds

    def time_first_token(
        self, has_token: Callable[[], bool], recorded: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Starts to time a request. To be called after each event: records the first one that `has_token`, and calls
        `recorded` then."""
        begin = time.perf_counter()
        is_recorded = False

        def check() -> None:
            nonlocal is_recorded
            if not is_recorded and has_token():
                is_recorded = True
                self.first_token_seconds.append(time.perf_counter() - begin)
                recorded()

        return check

    @contextmanager
    def count_request(self, token_count: int = 0) -> Iterator[QueuedPrompt]:
        """Counts a request as in flight, and its prompt, of which it has to compute `token_count` tokens, as queued."""
        self.in_flight_count += 1
        prompt = self.queue.add(token_count, time.monotonic())
        try:
            yield prompt
        finally:
            self.in_flight_count -= 1
            self.queue.remove(prompt, time.monotonic())
