"""Health checks of engines, probes that identify an engine's models and instance, and failover between engines."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self, TypeVar

import msgspec

from lmkv.tiers import HANDOFF, PEERS
from lmkv_server.proxy.engine import MAX_HEALTH_TIMEOUTS, Engine, EngineModel, PrefixHits, QueuedPrompt
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.routing.pools import EnginePool, HeldTokens
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_SECONDS = 10.0
"""Deadline of a probe, which generates one token: the engine may have queued requests."""
PROBE_INTERVAL_SECONDS = 30.0
"""Time between probes of a healthy engine: its node may have restarted with another instance."""


_HIT_METRICS = (
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_hits_total",
    "request_prefill_time_seconds_sum",
)
_HIT_METRIC = re.compile(
    rf"^vllm:(?P<name>{'|'.join(_HIT_METRICS)})(?:\{{[^\n]*\}})? (?P<value>[0-9.eE+]+)$".encode(), re.MULTILINE
)
"""A line of vLLM's metrics: there is one for each engine core."""
_PULL_SECONDS = "peer_seconds_total"
_LOAD_METRIC = re.compile(
    rb'^lmkv:(?P<name>%b|tier_tokens_total(?=\{[^\n]*\btier="(?P<tier>%b|%b)"))(?:\{[^\n]*\})? '
    rb"(?P<value>[0-9.eE+]+)$" % (_PULL_SECONDS.encode(), HANDOFF.encode(), PEERS.encode()),
    re.MULTILINE,
)
"""A line of the connector's metrics: the time of fetches from peers, or tokens that came from peers or by handoffs."""


class HealthMonitor:
    """Checks and probes engines while `watch` runs."""

    def __init__(self, *, interval_seconds: float, timeout_seconds: float, api_key: str = "") -> None:
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def watch(self, client: UpstreamClient) -> None:
        """Monitors one engine until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check_periodically(client))
            group.create_task(self._probe_periodically(client))

    async def _check_periodically(self, client: UpstreamClient) -> None:
        engine = client.engine
        while True:
            if await self._check(client) and not engine.is_healthy:
                await self._probe(client)
                await self._read_hits(client)
                engine.mark_healthy()
                instance = f"instance {engine.instance_id}" if engine.instance_id else "without lmkv"
                logger.info("%s engine %s is healthy, %s", engine.role, engine.url, instance)
            await asyncio.sleep(self._interval_seconds)

    async def _probe_periodically(self, client: UpstreamClient) -> None:
        """Probes a healthy engine. A task of its own, since health checks must not wait for probes."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            if client.engine.is_healthy:
                await self._probe(client)
                await self._read_hits(client)

    async def _check(self, client: UpstreamClient) -> bool:
        """Whether the engine passes a health check. Marks it unhealthy otherwise, and fails its requests."""
        engine = client.engine
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await client.request("GET", "/health", self._headers)
        except TimeoutError:
            if engine.add_health_timeout():
                client.mark_unhealthy(f"{MAX_HEALTH_TIMEOUTS} consecutive health checks timed out")
                client.cancel_requests()
            return False
        except EngineFailed as error:
            client.mark_unhealthy(error.reason)
            client.cancel_requests()
            return False
        except EngineRejected as error:
            client.mark_unhealthy(f"its health check returned {error.response.status}")
            client.cancel_requests()
            return False
        engine.reset_health_timeouts()
        return True

    async def _read_hits(self, client: UpstreamClient) -> None:
        """Reads the engine's metrics. An engine may expose none."""
        hits = None
        with suppress(TimeoutError, EngineFailed, EngineRejected):
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                hits = prefix_hits((await client.request("GET", "/metrics", self._headers)).body)
        client.engine.take_hits(hits)

    async def _probe(self, client: UpstreamClient) -> None:
        """Asks for the engine's models and instance. An engine that does not report them serves nevertheless."""
        engine = client.engine
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                models = msgspec.json.decode((await client.request("GET", "/v1/models", self._headers)).body)
                engine.models = tuple(_model(card) for card in models["data"])
                probe = {"model": engine.model(None).name, "prompt": [1], "max_tokens": 1, "temperature": 0}
                body = msgspec.json.encode(probe | {"kv_transfer_params": {"lmkv": {}}})
                response = await client.request("POST", "/v1/completions", self._headers, body)
                update_instance(engine, msgspec.json.decode(response.body))
                engine.missing_paths.clear()
        except (
            TimeoutError,
            EngineFailed,
            EngineRejected,
            msgspec.DecodeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            fix = "; set engine_api_key" if isinstance(error, EngineRejected) and error.response.status == 401 else ""
            logger.warning("the probe of %s failed (%s)%s", engine.url, error or type(error).__name__, fix)


def prefix_hits(metrics: bytes) -> PrefixHits | None:
    """The counters of vLLM's prefix caches in its metrics; None if they are missing."""
    sums = dict.fromkeys(_HIT_METRICS, 0.0)
    lines = list(_HIT_METRIC.finditer(metrics))
    for line in lines:
        sums[line["name"].decode()] += float(line["value"])
    if not lines:
        return None
    asked, own, external, seconds = sums.values()
    loads = dict.fromkeys((HANDOFF, PEERS, _PULL_SECONDS), 0.0)
    for line in _LOAD_METRIC.finditer(metrics):
        loads[(line["tier"] or line["name"]).decode()] += float(line["value"])
    # Prefill engines have computed these tokens, and vLLM counts them as external hits.
    handed = min(loads[HANDOFF], external)
    return PrefixHits(
        asked_tokens=asked - handed,
        own_tokens=own,
        external_tokens=external - handed,
        prefill_seconds=seconds,
        pulled_tokens=loads[PEERS],
        pull_seconds=loads[_PULL_SECONDS],
    )


def update_instance(engine: Engine, response: Mapping[str, Any]) -> None:
    """Takes the engine's instance from a response, if the response reports it."""
    parameters = response.get("kv_transfer_params")
    lmkv = parameters.get("lmkv") if isinstance(parameters, dict) else None
    if isinstance(lmkv, dict):
        engine.instance_id = str(lmkv.get("instance_id", ""))


def _model(card: Mapping[str, Any]) -> EngineModel:
    return EngineModel(
        name=str(card["id"]), parent=str(card.get("parent") or ""), max_token_count=int(card.get("max_model_len") or 0)
    )


T = TypeVar("T")

MAX_ATTEMPTS = 2
"""A request that fails on two engines may itself be the cause."""


class NoHealthyEngine(Exception):
    """No engine that could serve the request is healthy."""


class EngineFailover:
    """Selects an engine, and another one if the first fails. While entered, the request counts as load of the engine.

    `cached` is the number of prompt tokens that each instance holds; `excluded` engines are never selected.
    Entering raises `NoHealthyEngine`.
    """

    def __init__(
        self,
        pool: EnginePool,
        session: str,
        cached: HeldTokens,
        metrics: ProxyMetrics,
        *,
        excluded: Sequence[Engine] = (),
    ) -> None:
        self._pool = pool
        self._session = session
        self._cached = cached
        self._metrics = metrics
        self._excluded = excluded
        self._tried: list[Engine] = []
        self._load = ExitStack()
        self._queued: QueuedPrompt | None = None

    @property
    def first(self) -> Engine:
        """The engine that was selected first."""
        return self._tried[0]

    def __enter__(self) -> Self:
        self._choose()
        return self

    def __exit__(self, *_: object) -> None:
        self._load.close()

    def follow(self) -> Callable[[], None]:
        """Call it before a stream of the engine begins, and the result at its first token: the prompt is computed."""
        engine, queued = self._tried[-1], self._queued
        assert queued
        queued.is_followed = True
        return lambda: engine.queue.remove(queued, time.monotonic())

    async def run(self, attempt: Callable[[Engine], Awaitable[T]]) -> T:
        """Runs `attempt` on the engine; on `EngineFailed`, on another one. Raises what the last attempt raised."""
        while True:
            engine = self._tried[-1]
            try:
                return await attempt(engine)
            except EngineFailed as error:
                logger.warning("%s", error)
                if error.is_final or len(self._tried) == MAX_ATTEMPTS:
                    raise
                try:
                    self._choose()
                except NoHealthyEngine:
                    raise error from None
                self._metrics.retries.labels(engine.role).inc()

    def _choose(self) -> None:
        excluded = (*self._excluded, *self._tried)
        cached = self._cached
        engine = self._pool.choose(
            time.monotonic(), session=self._session, cached=cached, token_count=cached.token_count, excluded=excluded
        )
        if engine is None:
            raise NoHealthyEngine
        self._pool.consider_copy(time.monotonic(), engine, cached, excluded)
        self._load.close()
        self._queued = self._load.enter_context(engine.count_request(cached.uncached_by(engine)))
        self._tried.append(engine)
