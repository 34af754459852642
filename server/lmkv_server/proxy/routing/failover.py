"""Failover of a request between the engines of a pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Self, TypeVar

from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.routing.pools import EnginePool
from lmkv_server.proxy.upstream.client import EngineFailed

logger = logging.getLogger(__name__)

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
        cached: Mapping[str, int],
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

    @property
    def first(self) -> Engine:
        """The engine that was selected first."""
        return self._tried[0]

    def __enter__(self) -> Self:
        self._choose()
        return self

    def __exit__(self, *_: object) -> None:
        self._load.close()

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
        engine = self._pool.choose(time.monotonic(), session=self._session, cached=self._cached, excluded=excluded)
        if engine is None:
            raise NoHealthyEngine
        self._load.close()
        self._load.enter_context(engine.count_request())
        self._tried.append(engine)
