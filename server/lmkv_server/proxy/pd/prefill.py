"""The prefill stage: a prefill engine computes the prompt and sends its KV cache to the decode engine's node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import Json
from lmkv_server.proxy.pd.handoff import HandoffIssuer, HandoffTicket
from lmkv_server.proxy.pd.parameters import prefill_body, token_limit
from lmkv_server.proxy.pd.request import CompletionRequest
from lmkv_server.proxy.routing.failover import EngineFailover, NoHealthyEngine
from lmkv_server.proxy.routing.health import update_instance
from lmkv_server.proxy.routing.pools import EnginePool
from lmkv_server.proxy.statistics import LatencyStatistics
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient, json_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The response of a prefill engine, and the handoff of its KV cache."""

    response: Json
    decoder: Engine
    """The decode engine that was selected."""
    handoff: HandoffTicket | None
    """None if the KV cache is not sent to the decode engine's node."""

    def parameters_for(self, engine: Engine) -> Json | None:
        """Handoff parameters of a request to `engine`; None if the KV cache is not at its node."""
        return self.handoff.decode_parameters if self.handoff and engine is self.decoder else None

    def mark_response_from(self, engine: Engine) -> None:
        """Records that a decode engine has started its response: it has loaded the KV cache that was sent to it."""
        if self.handoff and engine is self.decoder:
            self.handoff.is_claimed = True
            self.handoff.let_go()


class PrefillStage:
    """Has prefill engines compute prompts."""

    def __init__(
        self,
        pool: EnginePool,
        clients: Mapping[Engine, UpstreamClient],
        handoffs: HandoffIssuer,
        statistics: LatencyStatistics,
        metrics: ProxyMetrics,
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._handoffs = handoffs
        self._statistics = statistics
        self._metrics = metrics

    async def run(
        self, request: CompletionRequest, cached: Mapping[str, int], decoder: Engine, *, with_tokens: bool
    ) -> PrefillResult | None:
        """Computes the prompt and sends its KV cache to the node of `decoder`; None if no prefill engine succeeds.

        A response of one token needs no handoff. Returns None without one if the instance of `decoder` is unknown.
        Raises `EngineRejected` only with `with_tokens`; else the decode engine responds to the request itself.
        """
        is_complete = with_tokens and token_limit(request.body, request.path) == 1
        if not (is_complete or decoder.instance_id):
            return None

        async def prefill(engine: Engine) -> PrefillResult:
            handoff = None if is_complete else self._handoffs.issue(decoder)
            try:
                response = await self._request(engine, request, handoff, with_tokens=with_tokens)
                token_count = _prompt_token_count(response, engine)
            except BaseException:  # cancelled or failed: the engine may have sent the KV cache nevertheless
                if handoff:
                    self.release(handoff, request)
                raise
            if handoff and self._handoffs.is_rejected(engine, response):
                handoff = None
            if handoff:
                handoff.prompt_token_count = token_count
                handoff.hold(engine)
            return PrefillResult(response=response, decoder=decoder, handoff=handoff)

        try:
            with EngineFailover(self._pool, request.session, cached, self._metrics) as prefillers:
                self._metrics.hit_tokens.inc(cached.get(prefillers.first.instance_id, 0))
                return await prefillers.run(prefill)
        except (NoHealthyEngine, EngineFailed):
            return None
        except EngineRejected:
            if with_tokens:
                raise
            return None

    def release(self, handoff: HandoffTicket, request: CompletionRequest) -> None:
        """Releases the handoff unless the decode engine has claimed it."""
        self._handoffs.release(handoff, request.body.get("model"), request.headers)

    async def _request(
        self, engine: Engine, request: CompletionRequest, handoff: HandoffTicket | None, *, with_tokens: bool
    ) -> Json:
        begin = time.perf_counter()
        body = prefill_body(request.body, handoff.signed if handoff else None, with_tokens=with_tokens)
        encoded = await request.encode(body)
        response = json_of(
            (await self._clients[engine].request("POST", request.path, request.headers, encoded)).body, engine
        )
        update_instance(engine, response)
        seconds = time.perf_counter() - begin
        engine.first_token_seconds.append(seconds)
        self._statistics.record_prefill(seconds)
        self._metrics.prefill_seconds.observe(seconds)
        return response


def _prompt_token_count(response: Json, engine: Engine) -> int:
    try:
        return int(response["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise EngineFailed(engine, "its response has no usage.prompt_tokens") from None
