"""Looks up at the coordinator how much of a prompt each instance holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter

from lmkv.errors import LmkvError, ModelNotFound
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.messages import by_tokens
from lmkv.telemetry.logs import LimitedLogger
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv_kernels import token_ids
from lmkv_server.http.json_text import LongValue, encode
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import COMPLETIONS, Json
from lmkv_server.proxy.routing.pools import HeldTokens
from lmkv_server.proxy.routing.replicas import PromptTokens
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient
from lmkv_server.proxy.upstream.tokenization import (
    NotTokenizable,
    Tokens,
    forwarded_tokens,
    tokenize_body,
    truncation,
)

logger = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_SECONDS = 1.0
"""A prompt whose tokenization takes longer is routed without a lookup."""
WARN_FAILURES = 3
"""Consecutive failed lookups before a warning is logged."""
LOG_SECONDS = 10.0
"""Minimum time between two such warnings."""
_LOOKUP = "lmkv.v1.CacheService/Lookup"


class _Tokens(msgspec.Struct):
    tokens: msgspec.Raw
    max_model_len: int = 0


_decode_tokens = msgspec.json.Decoder(_Tokens).decode


class RoutingCounters(Protocol):
    """The metrics of lookups."""

    @property
    def lookups(self) -> Counter: ...
    @property
    def asked_tokens(self) -> Counter: ...
    @property
    def hit_tokens(self) -> Counter: ...


class LookupFailures:
    """Counts lookups that fail, and logs once after `WARN_FAILURES` consecutive failures."""

    def __init__(self, log: logging.Logger, counters: RoutingCounters) -> None:
        self._counters = counters
        self._count_in_row = 0
        self._logger = log
        self._log = LimitedLogger(log, interval_seconds=LOG_SECONDS)  # clients can cause failures

    @property
    def is_failing(self) -> bool:
        """Whether the last lookups failed, `WARN_FAILURES` or more."""
        return self._count_in_row >= WARN_FAILURES

    def add(self, error: Exception) -> None:
        """Counts a failure."""
        self._counters.lookups.labels("failed").inc()
        self._count_in_row += 1
        if self._count_in_row == WARN_FAILURES:
            self._log.warning(
                "the last %d lookups failed; requests are routed by load alone until a lookup succeeds: %s",
                WARN_FAILURES,
                str(error) or type(error).__name__,
            )
        else:
            self._logger.debug("routed without a lookup: %s", str(error) or type(error).__name__)

    def clear(self) -> None:
        """Records a lookup that succeeded."""
        if self.is_failing:
            self._log.info("lookups succeed again, after %d failures", self._count_in_row)
        self._count_in_row = 0


class PrefixLookup:
    """Looks up prompts at a coordinator; at the next one if that is unreachable.

    A request whose lookup fails is routed by load alone.
    """

    def __init__(self, client: CoordinatorClient, metrics: ProxyMetrics, *, keeps_prompts: bool = False) -> None:
        """The caller closes `client`. `keeps_prompts`: with what is held of a prompt, the prompt is returned."""
        self._client = client
        self._keeps_prompts = keeps_prompts
        self._metrics = metrics
        self._failures = LookupFailures(logger, metrics)

    async def cached_tokens(
        self, client: UpstreamClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> HeldTokens:
        """The number of leading prompt tokens that each instance holds; empty on a miss or a failure.

        `client` tokenizes text. The lookup uses the model or LoRA adapter and the cache salt of the request, under
        the names that engines serve.
        """
        engine = client.engine
        model_name = body.get("model") or engine.model(None).name
        token_count = 0
        try:
            tokens = await tokens_of(client, path, body, headers)
            token_count = len(tokens)
            salt = body.get("cache_salt") or ""
            request = LookupRequest(prompt=by_tokens(tokens, model_name=model_name, cache_salt=salt))
            response = await self._look_up(request)
        except NotTokenizable as e:
            logger.debug("routed without a lookup: %s", e)
            self._metrics.lookups.labels("skipped").inc()
            return HeldTokens()
        except ModelNotFound as e:
            is_adapter = bool(engine.model(model_name).parent)  # the coordinator learns of an adapter at its first use
            if not is_adapter:
                return self._failed(e, token_count)
            logger.debug("routed without a lookup: %s", e)
            self._metrics.lookups.labels("miss").inc()
            return HeldTokens(token_count=token_count)
        except (
            LmkvError,
            EngineFailed,
            EngineRejected,
            TimeoutError,
            msgspec.DecodeError,
            KeyError,
            TypeError,
            ValueError,
        ) as e:
            return self._failed(e, token_count)
        self._failures.clear()
        self._metrics.asked_tokens.inc(len(tokens))
        self._metrics.lookups.labels("hit" if response.holders else "miss").inc()
        held = {holder.instance_id: holder.matched_token_count for holder in response.holders}
        known = PromptTokens(tokens=tokens, model_name=model_name, cache_salt=salt) if self._keeps_prompts else None
        return HeldTokens(held, token_count, known if held else None)

    def _failed(self, error: Exception, token_count: int) -> HeldTokens:
        self._failures.add(error)
        return HeldTokens(token_count=token_count)

    async def _look_up(self, request: LookupRequest) -> LookupResponse:
        deadline = time.monotonic() + self._client.timeout_seconds
        return await self._client.run(
            lambda to: to.call(
                to.cache.Lookup, request, timeout_seconds=deadline - time.monotonic(), span_name=_LOOKUP
            ),
            deadline,
        )


async def tokens_of(
    client: UpstreamClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> list[int]:
    """The tokens that the engine of `client` computes for a request. Raises as `tokenize`."""
    prompt = body.get("prompt") if path == COMPLETIONS else None
    if isinstance(prompt, LongValue):
        prompt = prompt.only
        if prompt.has_only_numbers:
            return cut_tokens(client, path, body, prompt.tokens().tolist())
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return cut_tokens(client, path, body, prompt)
    tokens: list[int] = (await tokenize(client, path, body, headers, prompt)).tolist()
    return tokens


async def tokenize(
    client: UpstreamClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str], prompt: object = None
) -> NDArray[np.uint32]:
    """The tokens that an engine computes for a chat, or for `prompt`, as the engine of `client` tokenizes them.

    Raises `NotTokenizable`, `EngineFailed`, `EngineRejected`, `TimeoutError`, or `ValueError` if the response has no
    tokens.
    """
    if (forwarded := forwarded_tokens(path, body)) is not None:
        return np.array(forwarded, np.uint32)
    asked = tokenize_body(path, body, prompt)
    cut = truncation(path, body)

    async def ask(asked: Json) -> tuple[NDArray[np.uint32], int]:
        response = _decode_tokens((await client.request("POST", "/tokenize", headers, encode(asked))).body)
        return token_ids(memoryview(response.tokens)), response.max_model_len

    async with asyncio.timeout(TOKENIZE_TIMEOUT_SECONDS):
        tokens, max_model_len = await ask(asked)
        if cut is None or cut.token_count(max_model_len) >= tokens.size:
            return tokens
        adds_special_tokens = asked.get("add_special_tokens", path == COMPLETIONS)
        if cut.side or not adds_special_tokens:
            return cut.cut(tokens, max_model_len)
        plain, _ = await ask(asked | {"add_special_tokens": False})
        return cut.cut_between(tokens, plain, max_model_len)


def cut_tokens(client: UpstreamClient, path: str, body: Mapping[str, Any], tokens: Tokens) -> Tokens:
    """The tokens that the engine of `client` computes, of those that a request has. Raises `NotTokenizable`."""
    cut = truncation(path, body)
    return tokens if cut is None else cut.cut(tokens, client.engine.model(body.get("model")).max_token_count)
