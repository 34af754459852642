"""Passes requests on as they are, to an engine that serves their path and their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from lmkv.config import ProxyConfig
from lmkv.runtime import turns
from lmkv_server.http.json_text import Encoded, encode
from lmkv_server.proxy.admission import AdmittedRequest, fields_of
from lmkv_server.proxy.engine import PREFILL, Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import MESSAGES, RESPONSES, Json, error_body
from lmkv_server.proxy.pd.parameters import ALONE, without_handoff
from lmkv_server.proxy.routing.health import EngineFailover, NoHealthyEngine
from lmkv_server.proxy.routing.lookup import PrefixLookup
from lmkv_server.proxy.routing.pools import (
    EnginePool,
    EnginePools,
    HeldTokens,
    Missing,
    SessionAffinity,
    Usual,
    cost_by,
)
from lmkv_server.proxy.routing.prompt import needed_fields
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, HttpResponse, UpstreamClient

GENERATING = frozenset({RESPONSES, MESSAGES})
"""Paths that generate tokens: their prompts are looked up, and their latencies are measured."""
UNCACHED = ("/tokenize", "/detokenize")
"""Paths whose requests use no prefix cache, and take no cache salt."""
PATHS = {
    **dict.fromkeys(("/v1/models", "/version", "/ping"), "GET"),
    **dict.fromkeys((*UNCACHED, "/v1/embeddings", *sorted(GENERATING)), "POST"),
}
"""The paths that are passed on, with their method."""
_PREFILL_COST = 1 << 60
"""More than any number of requests in flight: an engine that only prefills is selected if no other serves the path."""


class PathNotServed(Exception):
    """The engine has no such path."""


class PassThrough:
    """Passes requests on to the engines of `pools`.

    Engines are not asked which paths they serve: one that answers that it has no such path is left out of requests for
    it until its next probe.
    """

    def __init__(
        self,
        pools: EnginePools,
        clients: Mapping[Engine, UpstreamClient],
        lookup: PrefixLookup | None,
        config: ProxyConfig,
        metrics: ProxyMetrics,
    ) -> None:
        cost = cost_by("least_loaded" if lookup is None else config.policy)

        def cost_of(engine: Engine, missing: Missing, now: float, usual: Usual) -> float:
            return cost(engine, missing, now, usual) + (_PREFILL_COST if engine.role == PREFILL else 0)

        self._pool = EnginePool(pools.engines, cost_of, SessionAffinity(config.session_ttl))
        self._pool.replicas = pools.decode.replicas
        self._clients = clients
        self._lookup = lookup
        self._metrics = metrics

    async def serve(self, request: AdmittedRequest) -> None:
        """Serves a request, with failover like that of a completion.

        Raises `InvalidRequest`, `EngineRejected`, `EngineFailed` or `NoHealthyEngine`; `EngineRejected` with a 404 if
        all healthy engines lack the path.
        """
        async with turns.of_loop().take(request.caller, request.body.text_bytes):
            needed = needed_fields(request.path, reads_prompt=self._lookup is not None)
            body = fields_of(request, needed) if request.method == "POST" else {}
            sent = _sent(request, body)
            content = None
            if request.method == "POST":
                content = request.body.text if sent is body else encode(sent)
        writer = request.writer
        if request.path in GENERATING:
            writer.strategy = ALONE

        async def attempt(engine: Engine) -> None:
            try:
                if body.get("stream"):
                    await self._relay_events(engine, request, content, engines.follow())
                else:
                    response = await self._clients[engine].request(
                        request.method, request.path, request.headers, content
                    )
                    await writer.send(response, is_timed=request.path in GENERATING)
            except (EngineRejected, EngineFailed) as error:
                if not writer.status and _lacks_path(error.response):
                    engine.missing_paths.add(request.path)
                    raise PathNotServed from None
                raise

        cached = await self._cached_tokens(request, sent)
        while True:
            try:
                excluded = self._unfit(request.path, body.get("model"))
                with EngineFailover(self._pool, request.session, cached, self._metrics, excluded=excluded) as engines:
                    self._metrics.hit_tokens.inc(cached.get(engines.first.instance_id, 0))
                    return await engines.run(attempt)
            except PathNotServed:
                continue
            except NoHealthyEngine:
                if not any(engine.is_available for engine in self._pool.engines):
                    raise
                message = f"no engine serves {request.path}"
                raise EngineRejected(HttpResponse(status=404, body=error_body(404, message))) from None

    async def _cached_tokens(self, request: AdmittedRequest, body: Json) -> HeldTokens:
        """The number of prompt tokens that each instance holds; empty if the policy does not use it."""
        engine = self._pool.least_loaded()
        if self._lookup is None or engine is None or request.path not in GENERATING:
            return HeldTokens()
        return await self._lookup.cached_tokens(self._clients[engine], request.path, body, request.headers)

    def _unfit(self, path: str, model: object) -> list[Engine]:
        """The engines that lack the path; and those without the model, if another one has it."""
        fit = [engine for engine in self._pool.engines if engine.is_available and path not in engine.missing_paths]
        with_model = [engine for engine in fit if any(one.name == model for one in engine.models)]
        return [engine for engine in self._pool.engines if engine not in (with_model or fit)]

    async def _relay_events(
        self, engine: Engine, request: AdmittedRequest, content: Encoded | None, has_first: Callable[[], None]
    ) -> None:
        assert content is not None, "only requests with a body are streamed"
        writer = request.writer
        timed = engine.time_first_token(lambda: writer.has_token, has_first)
        try:
            async with self._clients[engine].stream(request.path, request.headers, content) as events:
                async for event in events:
                    await writer.send_event(event)
                    timed()
        except EngineFailed as error:
            error.is_final = bool(writer.status)  # events that were sent cannot be revoked
            raise
        await writer.end_stream()


def _sent(request: AdmittedRequest, body: Json) -> Json:
    """The body to send: as it came, but for handoff parameters and salts, which only the proxy sets."""
    if request.method != "POST":
        return body
    salted = body if request.path in UNCACHED else request.client.salted(request.path, body)
    return body if salted is body and "kv_transfer_params" not in body else without_handoff(salted)


def _lacks_path(response: HttpResponse | None) -> bool:
    """Whether an engine has no such path, or its model does not support it. A 404 for an unknown model says more."""
    if response is None or response.status != 404:
        return response is not None and response.status in (405, 501)
    try:
        content = msgspec.json.decode(response.body)
        reason = content.get("detail") or content["error"]["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
        reason = response.body.decode(errors="replace")
    return bool(reason == "Not Found")
