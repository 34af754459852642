"""The engines that one request asks for the same thing, one after the other."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.routing.engines import Engine, Pool
from lmkv_server.proxy.upstream.client import EngineFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 2
"""A request that two engines fail at may be what is wrong with them."""


class NoEngine(Exception):
    """No engine that could take the request is in."""


class EngineFailover:
    """While it is entered, a request is with an engine of the pool, and counts as its load.

    `held` is how many tokens of the request's prompt each instance holds. Entering raises `NoEngine`.
    """

    def __init__(self, pool: Pool, session: str, held: Mapping[str, int], metrics: Metrics) -> None:
        self._pool = pool
        self._session = session
        self._held = held
        self._metrics = metrics
        self._tried: list[Engine] = []
        self._load = ExitStack()

    @property
    def first(self) -> Engine:
        """The engine that was chosen first."""
        return self._tried[0]

    def __enter__(self) -> Self:
        self._choose()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._load.close()

    async def ask(self, ask: Callable[[Engine], Awaitable[T]]) -> T:
        """Has the engine do something; if it fails, another. Raises what the last one that was asked raised."""
        while True:
            engine = self._tried[-1]
            try:
                return await ask(engine)
            except EngineFailed as error:
                logger.warning("%s", error)
                if error.is_final or len(self._tried) == MAX_TRIES:
                    raise
                try:
                    self._choose()
                except NoEngine:
                    raise error from None
                self._metrics.retries.labels(engine.role).inc()

    def _choose(self) -> None:
        engine = self._pool.choose(time.monotonic(), session=self._session, held=self._held, excluded=self._tried)
        if engine is None:
            raise NoEngine
        self._load.close()  # the former has it no longer
        self._load.enter_context(engine.busy())
        self._tried.append(engine)
