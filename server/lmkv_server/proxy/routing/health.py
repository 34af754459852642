"""Asks each engine again and again whether it is well, and one that comes back who it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lmkv_server.proxy.routing.engines import MAX_SILENCES, Engine, Model
from lmkv_server.proxy.upstream.client import EngineFailed, Refused, Upstream

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_SECONDS = 10.0
"""Most time for one token of a probe: the engine may have others to serve first."""
PROBE_INTERVAL_SECONDS = 30.0
"""Time between two probes of an engine that is in: its node may have been started anew."""


class HealthWatch:
    """Looks at engines while `run` runs."""

    def __init__(
        self, upstreams: Sequence[Upstream], *, interval_seconds: float, timeout_seconds: float, api_key: str = ""
    ) -> None:
        self._upstreams = upstreams
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def run(self) -> None:
        """Watches all engines, for ever."""
        async with asyncio.TaskGroup() as group:
            for upstream in self._upstreams:
                group.create_task(self._watch(upstream))
                group.create_task(self._stay_acquainted(upstream))

    async def _watch(self, upstream: Upstream) -> None:
        engine = upstream.engine
        while True:
            if await self._is_well(upstream) and not engine.is_healthy:
                await self._get_to_know(upstream)
                engine.admit()
                where = f", instance {engine.instance_id}" if engine.instance_id else ", without lmkv"
                logger.info("%s engine %s is in%s", engine.role, engine.url, where)
            await asyncio.sleep(self._interval_seconds)

    async def _stay_acquainted(self, upstream: Upstream) -> None:
        """Asks an engine that is in who it is, for ever; beside the watch, which must not wait for that."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_SECONDS)
            if upstream.engine.is_healthy:
                await self._get_to_know(upstream)

    async def _is_well(self, upstream: Upstream) -> bool:
        engine = upstream.engine
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await upstream.ask("GET", "/health", self._headers)
        except TimeoutError:
            if engine.silent():
                upstream.lose(f"it has not said that it is well, {MAX_SILENCES} times in a row")
                upstream.cut()
            return False
        except (EngineFailed, Refused) as error:
            upstream.lose(error.trouble if isinstance(error, EngineFailed) else f"it answered {error.answer.status}")
            upstream.cut()
            return False
        engine.heard()
        return True

    async def _get_to_know(self, upstream: Upstream) -> None:
        """Asks what it serves and which instance its chunks are in. An engine that does not say serves all the same."""
        engine = upstream.engine
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                models = msgspec.json.decode((await upstream.ask("GET", "/v1/models", self._headers)).body)
                engine.models = tuple(_model(card) for card in models["data"])
                probe = {"model": engine.model(None).name, "prompt": [1], "max_tokens": 1, "temperature": 0}
                body = msgspec.json.encode(probe | {"kv_transfer_params": {"lmkv": {}}})
                answer = await upstream.ask("POST", "/v1/completions", self._headers, body)
                learn(engine, msgspec.json.decode(answer.body))
        except (TimeoutError, EngineFailed, Refused, msgspec.DecodeError, KeyError, TypeError) as error:
            fix = "; set engine_api_key" if isinstance(error, Refused) and error.answer.status == 401 else ""
            logger.warning("%s does not say who it is (%s)%s", engine.url, error or type(error).__name__, fix)


def learn(engine: Engine, answer: Mapping[str, Any]) -> None:
    """Takes what an answer says of the engine's node; nothing if it does not."""
    told = answer.get("kv_transfer_params")
    told = told.get("lmkv") if isinstance(told, dict) else None
    if isinstance(told, dict):
        engine.learn(str(told.get("instance_id", "")))


def _model(card: Mapping[str, Any]) -> Model:
    return Model(
        name=str(card["id"]), parent=str(card.get("parent") or ""), max_token_count=int(card.get("max_model_len") or 0)
    )
