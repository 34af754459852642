"""Serves a client's request: selects the engines, and the strategy by which they share it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lmkv_server.proxy.engine import PREFILL, Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.pd.decode import DecodeStage
from lmkv_server.proxy.pd.joiner import CannotContinue, ResponseJoiner
from lmkv_server.proxy.pd.parameters import ALONE, CONTINUE, OTHER, REASONS, REPEAT, needs_one_engine, repeat_reason
from lmkv_server.proxy.pd.prefill import CompletionRequest, HandoffIssuer, PrefillResult, PrefillStage
from lmkv_server.proxy.response import ResponseWriter
from lmkv_server.proxy.routing.failover import EngineFailover
from lmkv_server.proxy.routing.lookup import PrefixLookup
from lmkv_server.proxy.routing.pools import EnginePools
from lmkv_server.proxy.upstream.client import UpstreamClient

logger = logging.getLogger(__name__)


class RequestHandler:
    """Serves requests with the engines of `pools`."""

    def __init__(
        self,
        *,
        pools: EnginePools,
        clients: Mapping[Engine, UpstreamClient],
        lookup: PrefixLookup | None,
        handoffs: HandoffIssuer,
        metrics: ProxyMetrics,
    ) -> None:
        self._pools = pools
        self._clients = clients
        self._lookup = lookup
        self._prefill = PrefillStage(pools.prefill, clients, handoffs, metrics) if pools.prefill else None
        self._metrics = metrics

    async def serve(self, request: CompletionRequest, writer: ResponseWriter) -> None:
        """Serves a completion request.

        Raises `EngineRejected`, `EngineFailed` or `NoHealthyEngine`, possibly after the response has started.
        """
        writer.strategy = ALONE
        cached = await self._cached_tokens(request)
        with EngineFailover(self._pools.decode, request.session, cached, self._metrics) as decoders:
            decode = DecodeStage(request, writer, decoders, self._clients)
            if self._prefill is None or decoders.first.role == PREFILL:  # no decode engine can serve it
                self._metrics.hit_tokens.inc(cached.get(decoders.first.instance_id, 0))
                await decode.relay(None)
                return
            reason = repeat_reason(request.body, request.path)
            prefill = None
            if not needs_one_engine(request.body):
                prefill = await self._prefill.run(request, cached, decoders.first, with_tokens=not reason)
            try:
                if prefill is None:
                    await decode.relay(None)
                else:
                    await self._decode(request, writer, decode, prefill, reason)
            finally:
                if prefill and prefill.handoff:
                    self._prefill.release(prefill.handoff, request)

    async def _decode(
        self,
        request: CompletionRequest,
        writer: ResponseWriter,
        decode: DecodeStage,
        prefill: PrefillResult,
        reason: str,
    ) -> None:
        """Continues the prefill engine's response, or repeats its first token for `reason`."""
        joiner: ResponseJoiner | None = None
        if not reason:
            joiner, reason = _joiner(request, prefill)
        if joiner is not None:
            writer.strategy = CONTINUE
            await decode.continue_from(prefill, joiner)
        else:
            writer.strategy = REPEAT
            self._metrics.repeats.labels(reason if reason in REASONS else OTHER).inc()
            await decode.relay(prefill)

    async def _cached_tokens(self, request: CompletionRequest) -> Mapping[str, int]:
        """The number of prompt tokens that each instance holds; empty if the policy does not use it."""
        engine = self._pools.decode.least_loaded()
        if self._lookup is None or engine is None or needs_one_engine(request.body):
            return {}
        return await self._lookup.cached_tokens(self._clients[engine], request.path, request.body, request.headers)


def _joiner(request: CompletionRequest, prefill: PrefillResult) -> tuple[ResponseJoiner | None, str]:
    """A joiner that starts with the prefill engine's response; or None, and why the decode engine has to repeat it."""
    try:
        joiner = ResponseJoiner(request.path, request.body, prefill.response)
    except CannotContinue as error:
        logger.warning("the prefill engine's first token cannot be used: %s", error)
        return None, "first_token"
    limit = prefill.decoder.model(request.body.get("model")).max_token_count
    if not joiner.fits(limit):
        return None, "max_tokens"
    joiner.complete_at(limit)
    return (joiner, "") if joiner.is_complete or joiner.can_continue else (None, "first_token")
