"""Handoffs as the proxy names them to engines: signed, and released if no request will load them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec

from lmkv.auth.handoff import HandoffKeys
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.openai import COMPLETIONS, Json
from lmkv_server.proxy.pd.parameters import with_handoff
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient

logger = logging.getLogger(__name__)

MAX_RELEASES = 256
"""Concurrent releases. Beyond them a handoff expires by `pd_abandon_timeout` of the decode engine's node."""
RELEASE_TIMEOUT_SECONDS = 10.0


@dataclass(kw_only=True, slots=True)
class HandoffTicket:
    """Names one handoff from a prefill engine to a decode engine."""

    decoder: Engine
    signed: Json
    """Its request id and the decode engine's instance, with the proof of both."""
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
