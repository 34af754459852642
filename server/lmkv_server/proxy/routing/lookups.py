"""Who holds how much of a prompt, as the coordinator knows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError, ModelNotFound, Unreachable
from lmkv.rpc.failover import Failover
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.pd.parameters import CHAT
from lmkv_server.proxy.upstream.client import EngineFailed, Refused, Upstream

logger = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_SECONDS = 1.0
"""A prompt that takes longer is served without a lookup."""
WARN_FAILURES = 3
"""Lookups that fail in a row before a line in the log says so."""
LOG_SECONDS = 10.0
"""Minimum time between two such lines."""
_LOOKUP = "lmkv.v1.CacheService/Lookup"
_FOR_COMPLETION = ("model", "add_special_tokens")
_FOR_CHAT = (
    *("model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "tools"),
)
"""What an engine's `/tokenize` takes of a request."""


class Lookups:
    """Asks a coordinator, the same one until it does not answer.

    A lookup that fails is no more than a request that is routed by load alone.
    """

    def __init__(
        self, addresses: Sequence[str], credentials: Credentials, timeout_seconds: float, metrics: Metrics
    ) -> None:
        self._channels = {address: rpc.open_channel(address, credentials) for address in addresses}
        self._coordinators = Failover(addresses)
        self._timeout_seconds = timeout_seconds
        self._metrics = metrics
        self._failures_in_row = 0
        self._log = LimitedLogger(logger, interval_seconds=LOG_SECONDS)  # callers can make lookups fail

    async def aclose(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def held(
        self, upstream: Upstream, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Mapping[str, int]:
        """Tokens of the prompt that each instance holds, from the first; empty if none does, or the lookup fails.

        `upstream` makes tokens of text. The lookup names the model, or LoRA adapter, and the cache salt that the engine
        will use for this request: the coordinator knows them by the names under which engines serve them.
        """
        engine = upstream.engine
        model_name = body.get("model") or engine.model(None).name
        try:
            tokens = await self._tokens(upstream, path, body, headers)
            request = LookupRequest(tokens=tokens, model_name=model_name, cache_salt=body.get("cache_salt") or "")
            response = await self._ask(request)
        except ModelNotFound as e:
            is_adapter = bool(engine.model(model_name).parent)  # nothing is stored of one that was never used
            if not is_adapter:
                return self._failed(e)
            logger.debug("routed without a lookup: %s", e)
            self._metrics.lookups.labels("miss").inc()
            return {}
        except (
            LmkvError,
            EngineFailed,
            Refused,
            TimeoutError,
            msgspec.DecodeError,
            KeyError,
            TypeError,
            ValueError,
        ) as e:
            return self._failed(e)
        self._succeeded()
        self._metrics.asked_tokens.inc(len(tokens))
        self._metrics.lookups.labels("hit" if response.holders else "miss").inc()
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}

    def _failed(self, error: Exception) -> Mapping[str, int]:
        """Counts a failure, and logs once when the last few lookups have all failed."""
        self._metrics.lookups.labels("failed").inc()
        self._failures_in_row += 1
        if self._failures_in_row == WARN_FAILURES:
            self._log.warning(
                "the last %d lookups failed, so requests are routed by load alone until one succeeds: %s",
                WARN_FAILURES,
                str(error) or type(error).__name__,
            )
        else:
            logger.debug("routed without a lookup: %s", str(error) or type(error).__name__)
        return {}

    def _succeeded(self) -> None:
        if self._failures_in_row >= WARN_FAILURES:
            self._log.info("lookups succeed again, after %d that failed", self._failures_in_row)
        self._failures_in_row = 0

    async def _ask(self, request: LookupRequest) -> LookupResponse:
        address = self._coordinators.current
        cache: Any = CacheServiceStub(self._channels[address])
        try:
            return cast(LookupResponse, await rpc.call(cache.Lookup, _LOOKUP, address, request, self._timeout_seconds))
        except Unreachable:
            self._coordinators.report_failure(address)
            raise

    async def _tokens(
        self, upstream: Upstream, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return prompt
        asked = {name: body[name] for name in (_FOR_CHAT if path == CHAT else _FOR_COMPLETION) if name in body}
        if path != CHAT:
            asked["prompt"] = prompt
        async with asyncio.timeout(TOKENIZE_TIMEOUT_SECONDS):
            answer = await upstream.ask("POST", "/tokenize", headers, msgspec.json.encode(asked))
        tokens: list[int] = msgspec.json.decode(answer.body)["tokens"]
        return tokens
