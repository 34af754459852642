"""Has idle engines copy prefixes for which requests wait at the engines that hold them.

An engine that is sent a prompt which it does not hold has a copy afterwards. So a prefix keeps a single holder only if
each request for it prefers to wait there. These waits are added up. Once they are worth the memory of a copy, the
router sends the hint `replicate` to the engine that would have served these requests first with a copy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Protocol

import numpy as np

from lmkv.errors import LmkvError
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.messages import OUTCOMES_BY_NUMBER, by_tokens
from lmkv.telemetry.logs import LimitedLogger
from lmkv.v1 import chunk_pb2
from lmkv.v1.cache_service_pb2 import HintRequest
from lmkv.v1.prompt_pb2 import PromptSelector
from lmkv_server.proxy.engine import TURNOVER_SECONDS
from lmkv_server.proxy.metrics import RouterMetrics

logger = logging.getLogger(__name__)

MAX_PREFIXES = 10_000
"""Prefixes whose waits are known; further ones replace those that were waited for least recently."""
LEAST_REQUESTS = 3
"""The wait of one request counts as at most a third of what a copy is worth."""
FIRST_DEPTH = 16
DEPTH_GROWTH = 1.25
"""Waits are added up for prefixes of 16 tokens, 1.25 times as many, and so on: prompts may share any of them."""
MAX_SHOWN = 20
"""Copies that are remembered."""
HINT_SECONDS = 10.0
LOG_SECONDS = 600.0


class KnownPrompt(Protocol):
    """A prompt that was looked up."""

    def names(self, token_counts: Sequence[int]) -> list[bytes]:
        """Names the prefixes of these numbers of tokens, which rise; empty of one that is too short to be held."""

    def prefix(self, token_count: int) -> PromptSelector:
        """Selects a prefix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptTokens:
    """A prompt by its tokens."""

    tokens: Sequence[int]
    model_name: str
    cache_salt: str

    def names(self, token_counts: Sequence[int]) -> list[bytes]:
        digest = blake2b(f"{self.model_name}\0{self.cache_salt}".encode(), digest_size=16)
        tokens = np.array(self.tokens[: token_counts[-1]], np.uint32)
        names = []
        for begin, end in pairwise((0, *token_counts)):
            digest.update(tokens[begin:end].tobytes())
            names.append(digest.digest())
        return names

    def prefix(self, token_count: int) -> PromptSelector:
        return by_tokens(self.tokens[:token_count], model_name=self.model_name, cache_salt=self.cache_salt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """The time that a prompt would save at another engine, if that held as much of it as the chosen one."""

    instance_id: str
    """The instance of the other engine."""
    source: str
    """The instance of the engine that serves it."""
    seconds: float
    held_count: int
    """Tokens of the prompt that the source holds."""
    own_count: int
    """Tokens of them that the other one holds."""
    tokens_per_second: float
    """Speed at which the other one computes."""
    cost_per_token: float
    """Seconds that a token is worth that enters its memory."""

    def saved_seconds(self, token_count: int) -> float:
        """What it would save if it held this many tokens."""
        return self.seconds - (self.held_count - token_count) / self.tokens_per_second

    def cost_seconds(self, token_count: int) -> float:
        """What it costs to have it hold this many."""
        return (token_count - self.own_count) * self.cost_per_token


@dataclass(kw_only=True, slots=True, eq=False)
class Copy:
    """A copy that an instance was asked for."""

    source: str
    instance_id: str
    token_count: int
    waited_seconds: float
    time: float
    """In seconds since 1970."""
    outcome: str = ""
    """The outcome of the hint; empty until it is known."""


class HotPrefixes:
    """The time that requests have waited for prefixes, each the less, the longer ago that was. Pure."""

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._limit = limit
        self._waits: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Seconds and the time of the last request by name, in order of last use."""

    def __len__(self) -> int:
        return len(self._waits)

    def add(self, prompt: KnownPrompt, relief: Relief, now: float) -> tuple[int, float]:
        """Adds the wait of one request.

        Returns the number of tokens of the longest prefix that is worth a copy by now, and how long requests have
        waited for it; 0 if there is none. What is returned is forgotten.
        """
        counts = [
            count
            for count in _depths(relief.held_count)
            if count > relief.own_count and relief.saved_seconds(count) > 0
        ]
        if not counts:
            return 0, 0.0
        named = {name: count for name, count in zip(prompt.names(counts), counts, strict=True) if name}
        found, waited = 0, 0.0
        for name, count in named.items():
            seconds, last = self._waits.pop(name, (0.0, now))
            cost = relief.cost_seconds(count)
            seconds = seconds * math.exp((last - now) / TURNOVER_SECONDS)
            seconds += min(relief.saved_seconds(count), cost / LEAST_REQUESTS)
            self._waits[name] = seconds, now
            if seconds > cost * (1 - 1 / LEAST_REQUESTS):
                found, waited = count, seconds
        for name, count in named.items():
            if count <= found:
                del self._waits[name]
        while len(self._waits) > self._limit:
            self._waits.popitem(last=False)
        return found, waited


def _depths(token_count: int) -> Iterator[int]:
    depth = float(FIRST_DEPTH)
    while depth < token_count:
        yield int(depth)
        depth *= DEPTH_GROWTH
    yield token_count


class Replicas:
    """Asks instances for copies while `run` runs, one after the other."""

    def __init__(self, client: CoordinatorClient, metrics: RouterMetrics) -> None:
        """The caller closes `client`."""
        self.hot = HotPrefixes()
        self.copies: deque[Copy] = deque(maxlen=MAX_SHOWN)
        """The last copies that were asked for."""
        self._client = client
        self._metrics = metrics
        self._wanted: asyncio.Queue[tuple[Copy, PromptSelector]] = asyncio.Queue(maxsize=1)
        self._log = LimitedLogger(logger, interval_seconds=LOG_SECONDS)

    def consider(self, prompt: KnownPrompt, relief: Relief, now: float) -> None:
        """Counts that a request waits, and wants a copy if that is worth it. Of two wants at a time, one is dropped."""
        token_count, waited = self.hot.add(prompt, relief, now)
        if token_count and not self._wanted.full():
            copy = Copy(
                source=relief.source,
                instance_id=relief.instance_id,
                token_count=token_count,
                waited_seconds=waited,
                time=time.time(),
            )
            self._wanted.put_nowait((copy, prompt.prefix(token_count)))

    async def run(self) -> None:
        """Sends the hints, until it is cancelled."""
        while True:
            copy, prompt = await self._wanted.get()
            copy.outcome = await self._ask(copy, prompt)
            self.copies.append(copy)
            self._metrics.replicas.labels(copy.outcome).inc()
            logger.info(
                "%s was asked to copy %d tokens of a prompt, for which requests have waited at %s: %s",
                *(copy.instance_id, copy.token_count, copy.source, copy.outcome),
            )

    async def _ask(self, copy: Copy, prompt: PromptSelector) -> str:
        request = HintRequest(
            prompt=prompt,
            instance_id=copy.instance_id,
            action=chunk_pb2.HINT_ACTION_REPLICATE,
            request_id=str(uuid.uuid4()),
        )
        try:
            response = await self._client.run(
                lambda to: to.call(to.cache.Hint, request, timeout_seconds=HINT_SECONDS),
                time.monotonic() + HINT_SECONDS,
            )
        except LmkvError as error:
            self._log.warning("no copies of prompts are made: %s", error)
            return "failed"
        outcome = OUTCOMES_BY_NUMBER.get(response.result.outcome)
        return outcome.value if outcome else "failed"
