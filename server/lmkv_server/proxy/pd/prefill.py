"""The prefill stage: a prefill engine computes the prompt and sends its KV cache to the decode engine's node.

Handoffs are named to engines here: they are signed, and released if no request will load them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec

from lmkv.auth.handoff import HandoffKeys
from lmkv.runtime import turns
from lmkv_server.http.json_text import Encoded, encode
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import COMPLETIONS, Json
from lmkv_server.proxy.pd.parameters import prefill_body, token_limit, with_handoff
from lmkv_server.proxy.routing.health import EngineFailover, NoHealthyEngine, update_instance
from lmkv_server.proxy.routing.pools import EnginePool, HeldTokens
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient, json_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A completion or chat completion request."""

    path: str
    body: Json
    """The body without handoff parameters, which only the proxy sets."""
    size_bytes: int
    """Size of the body, as the client has sent it."""
    headers: Mapping[str, str]
    """Headers that are forwarded to engines."""
    caller: str
    """The caller that shares of the proxy's limits are counted for: a token, or an address."""
    session: str = ""
    sent: bytes = b""
    """The body as the client has sent it, if nothing in it was replaced."""

    @property
    def is_streamed(self) -> bool:
        """Whether the response is a stream of events."""
        return bool(self.body.get("stream"))

    async def encode(self, body: Json) -> Encoded:
        """The body that an engine receives, made of the client's. A large body that differs waits for its turn."""
        if self.sent and body == self.body:  # values are the same objects: they are not compared
            return self.sent
        async with turns.of_loop().take(self.caller, self.size_bytes):
            return encode(body)


MAX_RELEASES = 256
"""Concurrent releases. Beyond them a handoff expires by `pd_abandon_timeout` of the decode engine's node."""
RELEASE_TIMEOUT_SECONDS = 10.0


@dataclass(kw_only=True, slots=True)
class HandoffTicket:
    """Names one handoff from a prefill engine to a decode engine."""

    decoder: Engine
    signed: Json
    """The request id and the decode engine's instance, with the proof of both."""
    prompt_token_count: int = 0
    """Number of prompt tokens, which the decode engine loads; 0 before the prefill engine has responded."""
    is_claimed: bool = False
    """Whether the decode engine has responded to the request that loads it. Before that the request may be lost."""
    prefiller: Engine | None = None
    """The prefill engine whose node may still be read from. It does not leave before `let_go`."""

    def hold(self, prefiller: Engine) -> None:
        """Keeps the prefill engine until the handoff is claimed or released."""
        self.prefiller = prefiller
        prefiller.handoff_count += 1

    def let_go(self) -> None:
        """The prefill engine may leave. Idempotent."""
        prefiller, self.prefiller = self.prefiller, None
        if prefiller is not None:
            prefiller.handoff_count -= 1

    @property
    def decode_parameters(self) -> Json:
        """The handoff parameters of the decode engine's request."""
        return {**self.signed, "prompt_token_count": self.prompt_token_count}


class HandoffIssuer:
    """Issues handoffs, and releases those that no request will load. Closed by `aclose`."""

    def __init__(self, keys: HandoffKeys, clients: Mapping[Engine, UpstreamClient]) -> None:
        self._keys = keys
        self._clients = clients
        self._releases: set[asyncio.Task[None]] = set()
        self._rejections: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()

    def issue(self, decoder: Engine) -> HandoffTicket:
        """A new handoff. Each attempt needs its own, so that an interrupted one is not mistaken for the next."""
        handoff_id, instance = uuid.uuid4().hex, decoder.instance_id
        proof = self._keys.prove(handoff_id, instance)
        return HandoffTicket(decoder=decoder, signed={"handoff_id": handoff_id, "decode_instance": instance, **proof})

    def is_rejected(self, engine: Engine, response: Json) -> bool:
        """Whether a prefill engine's response says that it does not send the KV cache. Logs each reason once."""
        parameters = response.get("kv_transfer_params")
        lmkv = parameters.get("lmkv") if isinstance(parameters, dict) else None
        reason = str(lmkv.get("handoff_refused", "")) if isinstance(lmkv, dict) else "it has no lmkv connector"
        if reason and self._rejections.get(engine) != reason:
            logger.warning("%s rejects handoffs: %s", engine.url, reason[:500])
        self._rejections[engine] = reason
        return bool(reason)

    def release(self, ticket: HandoffTicket, model: object, headers: Mapping[str, str]) -> None:
        """Has the decode engine release a handoff that was not claimed. Returns immediately."""
        ticket.let_go()
        engine = ticket.decoder
        if ticket.is_claimed or not engine.is_healthy or len(self._releases) >= MAX_RELEASES:
            return
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        body = with_handoff(body, {**ticket.signed, "prompt_token_count": 0})
        task = asyncio.create_task(
            self._release(engine, headers, msgspec.json.encode(body)), name="lmkv-release-handoff"
        )
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, engine: Engine, headers: Mapping[str, str], body: bytes) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_SECONDS):
                await self._clients[engine].request("POST", COMPLETIONS, headers, body)
        except (TimeoutError, EngineFailed, EngineRejected) as error:
            logger.debug(
                "a handoff to %s was not released and will expire: %s", engine.url, error or type(error).__name__
            )

    async def aclose(self) -> None:
        """Cancels releases in flight. Idempotent."""
        tasks = list(self._releases)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillResult:
    """The response of a prefill engine, and the handoff of its KV cache."""

    response: Json
    decoder: Engine
    """The decode engine that was selected."""
    handoff: HandoffTicket | None
    """The ticket of the handoff; None if the KV cache is not sent to the decode engine's node."""

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
        metrics: ProxyMetrics,
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._handoffs = handoffs
        self._metrics = metrics

    async def run(
        self, request: CompletionRequest, cached: HeldTokens, decoder: Engine, *, with_tokens: bool
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
        self._metrics.latencies.record_prefill(seconds)
        self._metrics.prefill_seconds.observe(seconds)
        return response


def _prompt_token_count(response: Json, engine: Engine) -> int:
    try:
        return int(response["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise EngineFailed(engine, "its response has no usage.prompt_tokens") from None
