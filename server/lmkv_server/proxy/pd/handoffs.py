"""Handoffs as the proxy names them to engines: vouched for, and ended where no request will load them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lmkv.auth.handoff import HandoffKeys
from lmkv_server.proxy.pd.parameters import COMPLETIONS, with_hand_over
from lmkv_server.proxy.routing.engines import Engine
from lmkv_server.proxy.upstream.client import EngineFailed, Refused, Upstream

logger = logging.getLogger(__name__)

MAX_ENDING = 256
"""Messages under way that end handoffs; beyond them a handoff is left to `pd_abandon_timeout` of the decode's node."""
END_TIMEOUT_SECONDS = 10.0

Json = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Handoff:
    """One prompt's way from a prefill engine to a decode engine."""

    decoder: Engine
    proven: Json
    """Its name and the decode engine's instance, with the proof of both."""
    prompt_token_count: int = 0
    """Once the prefill engine has answered: the tokens of the prompt, which the decode engine loads."""
    is_claimed: bool = False
    """Whether the decode engine has answered the request that loads it: before that the request may be lost."""

    def for_decode(self) -> Json:
        """What the decode engine is told with the request that loads it."""
        return {**self.proven, "prompt_token_count": self.prompt_token_count}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """What a prefill engine has done."""

    answer: Json
    to: Engine
    """The decode engine that was chosen."""
    handoff: Handoff | None
    """How the KV cache gets to its node; None if it does not."""

    def parameters_for(self, engine: Engine) -> Json | None:
        """What an engine is told of the handoff; nothing if it is another than the one that has the KV cache."""
        return self.handoff.for_decode() if self.handoff and engine is self.to else None

    def answered_by(self, engine: Engine) -> None:
        """A decode engine has begun its answer: what was handed to it, it has loaded."""
        if self.handoff and engine is self.to:
            self.handoff.is_claimed = True


class Handoffs:
    """Names handoffs, and ends those that will not be loaded. Ended by `aclose`."""

    def __init__(self, keys: HandoffKeys, upstreams: Mapping[Engine, Upstream]) -> None:
        self.ended_count = 0
        """Handoffs that no request loaded, since the start."""
        self._keys = keys
        self._upstreams = upstreams
        self._ending: set[asyncio.Task[None]] = set()
        self._refusals: dict[Engine, str] = {}

    def make(self, decoder: Engine) -> Handoff:
        """A handoff of its own for each try: one that broke off must not be taken for the next."""
        request_id, instance = uuid.uuid4().hex, decoder.instance_id
        proof = self._keys.prove(request_id, instance)
        return Handoff(decoder=decoder, proven={"request_id": request_id, "decode_instance": instance, **proof})

    def is_refused(self, engine: Engine, answer: Json) -> bool:
        """Whether a prefill engine's answer says that its handoff does not take place. Logs each reason once."""
        said = answer.get("kv_transfer_params")
        said = said.get("lmkv") if isinstance(said, dict) else None
        reason = str(said.get("handoff_refused", "")) if isinstance(said, dict) else "it has no lmkv connector"
        if reason and self._refusals.get(engine) != reason:
            logger.warning("%s hands no prompts over: %s", engine.url, reason[:500])
        self._refusals[engine] = reason
        return bool(reason)

    def end(self, handoff: Handoff, model: object, headers: Mapping[str, str]) -> None:
        """Has the decode engine end a handoff that was not claimed. Returns at once."""
        engine = handoff.decoder
        if handoff.is_claimed or not engine.is_healthy or len(self._ending) >= MAX_ENDING:
            return
        self.ended_count += 1
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0}
        body = with_hand_over(body, {**handoff.proven, "prompt_token_count": 0})
        task = asyncio.create_task(self._end(engine, headers, msgspec.json.encode(body)), name="lmkv-end-handoff")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, engine: Engine, headers: Mapping[str, str], body: bytes) -> None:
        try:
            async with asyncio.timeout(END_TIMEOUT_SECONDS):
                await self._upstreams[engine].ask("POST", COMPLETIONS, headers, body)
        except (TimeoutError, EngineFailed, Refused) as error:
            logger.debug("a handoff to %s is left to be abandoned: %s", engine.url, error or type(error).__name__)

    async def aclose(self) -> None:
        """Stops ending handoffs. Idempotent."""
        tasks = list(self._ending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
