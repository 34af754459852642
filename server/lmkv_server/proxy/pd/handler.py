"""Serves a request: selects the engines and how they share it, and sends the client the decode engine's response."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import msgspec

from lmkv_server.proxy.engine import PREFILL, Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import DONE, Json, data_of, event_of
from lmkv_server.proxy.pd.joiner import CannotContinue, ResponseJoiner, with_common_hits
from lmkv_server.proxy.pd.parameters import (
    ALONE,
    CONTINUE,
    OTHER,
    REASONS,
    REPEAT,
    decode_body,
    needs_one_engine,
    repeat_reason,
    with_handoff,
    without_handoff,
)
from lmkv_server.proxy.pd.prefill import CompletionRequest, HandoffIssuer, PrefillResult, PrefillStage
from lmkv_server.proxy.response import ResponseWriter
from lmkv_server.proxy.routing.health import EngineFailover, update_instance
from lmkv_server.proxy.routing.lookup import PrefixLookup
from lmkv_server.proxy.routing.pools import EnginePools, HeldTokens
from lmkv_server.proxy.upstream.client import EngineFailed, HttpResponse, UpstreamClient, json_of

logger = logging.getLogger(__name__)

_INCOMPLETE = "its response ended early"
_DETAILS = b'"prompt_tokens_details"'
"""Is in responses with a usage that may count a handoff as cached."""

_encode = msgspec.json.encode


class DecodeStage:
    """Sends one client the response to its request."""

    def __init__(
        self,
        request: CompletionRequest,
        writer: ResponseWriter,
        decoders: EngineFailover,
        clients: Mapping[Engine, UpstreamClient],
    ) -> None:
        self._request = request
        self._writer = writer
        self._decoders = decoders
        self._clients = clients

    async def relay(self, prefill: PrefillResult | None) -> None:
        """Sends an engine's response to the client's own request. Raises `EngineFailed` or `EngineRejected`."""

        async def relay(engine: Engine) -> None:
            body = with_handoff(self._request.body, prefill.parameters_for(engine) if prefill else None)
            if self._request.is_streamed:
                await self._relay_events(engine, body, prefill)
                return
            response = await self._complete(engine, body, prefill)
            if prefill:
                prefill.mark_response_from(engine)
            await self._writer.send(response)

        await self._decoders.run(relay)

    async def continue_from(self, prefill: PrefillResult, joiner: ResponseJoiner) -> None:
        """Sends the first token, then what a decode engine generates after it. Raises as `relay`."""

        def body_for(engine: Engine) -> Json:
            joiner.restart()
            body, handoff = self._request.body, prefill.parameters_for(engine)
            return decode_body(body, self._request.path, joiner.prompt, joiner.delivered, handoff)

        async def merge(engine: Engine) -> bytes:
            with _translate_errors(engine):
                response = await self._send(engine, body_for(engine))
                continuation = json_of(response.body, engine)
                update_instance(engine, continuation)
                prefill.mark_response_from(engine)
                return joiner.merge(continuation)

        async def continue_stream(engine: Engine) -> None:
            with _translate_errors(engine):
                await self._continue_stream(engine, body_for(engine), joiner, prefill)

        if not self._request.is_streamed:
            merged = joiner.merge(None) if joiner.is_complete else await self._decoders.run(merge)
            await self._writer.send(HttpResponse(status=200, body=merged))
            return
        for event in joiner.first_events():
            await self._writer.send_event(event)
        if not joiner.is_complete:
            await self._decoders.run(continue_stream)
        for event in joiner.last_events():
            await self._writer.send_event(event)
        await self._writer.end_stream()

    async def _continue_stream(
        self, engine: Engine, body: Json, joiner: ResponseJoiner, prefill: PrefillResult
    ) -> None:
        """Sends the events of a decode engine after the tokens that the client has, except for the final `[DONE]`."""
        try:
            async with self._stream(engine, body) as events:
                async for event in events:
                    data = data_of(event)
                    if data in (b"", b"[DONE]"):
                        continue
                    prefill.mark_response_from(engine)
                    chunk = json_of(data, engine)
                    if "error" in chunk:
                        raise EngineFailed(
                            engine, "its response ended with an error", HttpResponse(status=500, body=data)
                        )
                    if continuation := joiner.rewrite(chunk):
                        await self._writer.send_event(continuation)
        except EngineFailed as error:
            if not joiner.is_complete:  # else only the usage is missing
                raise
            logger.warning("%s", error)
        if not joiner.is_complete:
            raise EngineFailed(engine, _INCOMPLETE)

    async def _relay_events(self, engine: Engine, body: Json, prefill: PrefillResult | None) -> None:
        last = b""
        timed = engine.time_first_token(lambda: self._writer.has_token, self._decoders.follow())
        try:
            async with self._stream(engine, body) as events:
                async for last in events:
                    if prefill:
                        prefill.mark_response_from(engine)
                    event = last
                    if prefill and _DETAILS in last and (data := data_of(last)):
                        event = event_of(_encode(_usage_of_both(prefill, json_of(data, engine))))
                    await self._writer.send_event(event)
                    timed()
            if last != DONE:
                raise EngineFailed(engine, _INCOMPLETE)
        except EngineFailed as error:
            error.is_final = bool(self._writer.status)  # events that were sent cannot be revoked
            raise
        await self._writer.end_stream()

    async def _complete(self, engine: Engine, body: Json, prefill: PrefillResult | None) -> HttpResponse:
        """An engine's response without handoff parameters."""
        response = await self._send(engine, body)
        if b'"lmkv"' not in response.body and not (prefill and _DETAILS in response.body):
            return response
        content = json_of(response.body, engine)
        update_instance(engine, content)
        if prefill:
            content = _usage_of_both(prefill, content)
        return HttpResponse(status=200, body=_encode(without_handoff(content)), headers=response.headers)

    async def _send(self, engine: Engine, body: Json) -> HttpResponse:
        request = self._request
        encoded = await request.encode(body)
        return await self._clients[engine].request("POST", request.path, request.headers, encoded)

    @asynccontextmanager
    async def _stream(self, engine: Engine, body: Json) -> AsyncIterator[AsyncIterator[bytes]]:
        request = self._request
        encoded = await request.encode(body)
        async with self._clients[engine].stream(request.path, request.headers, encoded) as events:
            yield events


def _usage_of_both(prefill: PrefillResult, content: Json) -> Json:
    """A response or an event of a decode engine whose usage counts as cached what neither engine has computed."""
    usage = content.get("usage")
    return {**content, "usage": with_common_hits(prefill.response, usage)} if isinstance(usage, dict) else content


@contextmanager
def _translate_errors(engine: Engine) -> Iterator[None]:
    """Raises `EngineFailed` for a response that cannot be joined."""
    try:
        yield
    except CannotContinue as error:
        raise EngineFailed(engine, str(error)) from None


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

    @property
    def reads_prompts(self) -> bool:
        """Whether it looks into prompts: to look them up, or to share requests between engines."""
        return self._lookup is not None or self._prefill is not None

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

    async def _cached_tokens(self, request: CompletionRequest) -> HeldTokens:
        """The number of prompt tokens that each instance holds; empty if the policy does not use it."""
        engine = self._pools.decode.least_loaded()
        if self._lookup is None or engine is None or needs_one_engine(request.body):
            return HeldTokens()
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
