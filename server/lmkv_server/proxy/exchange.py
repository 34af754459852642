"""One client's request on its way through the engines: who is asked what, and who is asked when one fails."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from lmkv_server.proxy.engines import Engine, Fleet, Pool
from lmkv_server.proxy.events import DONE, data_of
from lmkv_server.proxy.health import learn
from lmkv_server.proxy.joint import Joint, NotContinued
from lmkv_server.proxy.lookups import Lookups
from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.reply import Reply
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream import Answer, EngineFailed, Refused, Upstream
from lmkv_server.proxy.ways import (
    ALONE,
    CONTINUE,
    REASONS,
    REPEAT,
    decode_body,
    is_alone,
    prefill_body,
    why_repeat,
    with_hand_over,
    without_hand_over,
)

logger = logging.getLogger(__name__)

MAX_TRIES = 2
"""Engines of a role that a request asks one after the other."""

Json = dict[str, Any]
T = TypeVar("T")


class NoEngine(Exception):
    """No engine that could take the request is in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a client asks."""

    path: str
    body: Json
    """Without any word on hand-overs: those are the proxy's."""
    headers: Mapping[str, str]
    """As engines get them."""
    session: str = ""

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled:
    """What a prefill engine has done."""

    answer: Json
    told: Json
    """What the decode engine is told of the hand-over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """A request, what its client gets, and where it goes."""

    call: Call
    reply: Reply
    held: Mapping[str, int]
    """Tokens of the prompt that each instance holds."""
    decoder: Engine
    """Whose node takes the hand-over; without prefill engines, who does everything."""


class Exchange:
    """Serves requests with the engines of a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        upstreams: Mapping[Engine, Upstream],
        lookups: Lookups | None,
        statistics: Statistics,
        metrics: Metrics,
    ) -> None:
        self._prefill = fleet.prefill
        self._decode = fleet.decode
        self._upstreams = upstreams
        self._lookups = lookups
        self._statistics = statistics
        self._metrics = metrics

    async def pass_on(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """The answer of any engine to what all answer alike. Raises `Refused`, `EngineFailed` or `NoEngine`."""
        engine = self._decode.least_loaded() or (self._prefill and self._prefill.least_loaded())
        if not engine:
            raise NoEngine
        return await self._upstreams[engine].ask(method, path, headers, body)

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answers a request. Raises `Refused`, `EngineFailed` or `NoEngine`, perhaps when the answer has begun."""
        reply.way = ALONE
        held = await self._held(call)
        chosen = self._choose(self._decode, call, held)
        if self._prefill is None:
            self._count_hit(held, chosen)
        route = _Route(call=call, reply=reply, held=held, decoder=chosen)
        prefilled: Prefilled | None = None
        reason = why_repeat(call.body, call.path)
        if self._prefill is not None and chosen.peer_address and not is_alone(call.body):
            prefilled = await self._hand_over(route, self._prefill, with_tokens=not reason)
        if prefilled is None:
            await self._relay(route, None)
            return
        joint: Joint | None = None
        if not reason:
            joint, reason = _join(call, chosen, prefilled.answer)
        if joint is not None:
            reply.way = CONTINUE
            await self._go_on(route, joint, prefilled.told)
        else:
            reply.way = REPEAT
            self._metrics.repeats.labels(reason if reason in REASONS else "other").inc()
            await self._relay(route, prefilled.told)

    async def _held(self, call: Call) -> Mapping[str, int]:
        """Tokens of the prompt that each instance holds, where the policy asks for it."""
        engine = self._decode.least_loaded()
        if self._lookups is None or engine is None or is_alone(call.body):
            return {}
        return await self._lookups.held(self._upstreams[engine], call.path, call.body, call.headers)

    def _count_hit(self, held: Mapping[str, int], engine: Engine) -> None:
        self._metrics.hit_tokens.inc(held.get(engine.instance_id, 0))

    def _choose(self, pool: Pool, call: Call, held: Mapping[str, int], excluded: Collection[Engine] = ()) -> Engine:
        engine = pool.choose(time.monotonic(), session=call.session, held=held, excluded=excluded)
        if engine is None:
            raise NoEngine
        return engine

    async def _try(self, pool: Pool, route: _Route, chosen: Engine, ask: Callable[[Engine], Awaitable[T]]) -> T:
        """Has the chosen engine do something; if it fails, another. Raises what the last one that was asked raised."""
        tried = [chosen]
        while True:
            try:
                return await ask(tried[-1])
            except EngineFailed as error:
                logger.warning("%s", error)
                another = None
                if len(tried) < MAX_TRIES and not error.is_final:
                    another = pool.choose(time.monotonic(), session=route.call.session, held=route.held, excluded=tried)
                if another is None:
                    raise
                self._metrics.retries.labels(another.role).inc()
                tried.append(another)

    async def _hand_over(self, route: _Route, pool: Pool, *, with_tokens: bool) -> Prefilled | None:
        """Has a prefill engine compute the prompt and hand it to the decode engine; None if none does.

        Raises `Refused` if the first token is wanted: in any other case the decode engine has its own word on that.
        """
        try:
            chosen = self._choose(pool, route.call, route.held)
            self._count_hit(route.held, chosen)
            return await self._try(
                pool, route, chosen, lambda engine: self._ask_prefill(engine, route, with_tokens=with_tokens)
            )
        except (NoEngine, EngineFailed):
            return None
        except Refused:
            if with_tokens:
                raise
            return None

    async def _ask_prefill(self, engine: Engine, route: _Route, *, with_tokens: bool) -> Prefilled:
        request_id = uuid.uuid4().hex  # of each try its own: one that broke off must not be taken for the next
        hand_over = {"request_id": request_id, "decode_address": route.decoder.peer_address}
        begin = time.perf_counter()
        answer = await self._ask(engine, route.call, prefill_body(route.call.body, hand_over, with_tokens=with_tokens))
        seconds = time.perf_counter() - begin
        try:
            token_count = int(answer["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError):
            raise EngineFailed(f"{engine.url} does not count the tokens of the prompt") from None
        self._statistics.prefilled(seconds)
        self._metrics.prefill_seconds.observe(seconds)
        return Prefilled(answer=answer, told={"request_id": request_id, "prompt_token_count": token_count})

    async def _go_on(self, route: _Route, joint: Joint, told: Json) -> None:
        """Gives the client the first token, and what a decode engine says behind it."""
        call, reply = route.call, route.reply

        def body_for(engine: Engine) -> Json:
            joint.go_on()
            hand_over = told if engine is route.decoder else None  # no other has what was handed over
            return decode_body(call.body, call.path, joint.prompt, joint.taken, hand_over)

        async def follow(engine: Engine) -> None:
            await self._follow(engine, call, body_for(engine), joint, reply)

        async def join(engine: Engine) -> bytes:
            return _joined(joint, await self._ask(engine, call, body_for(engine)), engine)

        if not call.is_streamed:
            whole = joint.whole(None) if joint.is_over else await self._try(self._decode, route, route.decoder, join)
            await reply.answer(Answer(status=200, body=whole))
            return
        for event in joint.opening():
            await reply.event(event)
        if not joint.is_over:
            await self._try(self._decode, route, route.decoder, follow)
        for event in joint.ending():
            await reply.event(event)
        await reply.end()

    async def _follow(self, engine: Engine, call: Call, body: Json, joint: Joint, reply: Reply) -> None:
        """Passes on what a decode engine says behind the tokens that the client has, but for its mark of the end."""
        try:
            async with self._upstreams[engine].stream(call.path, call.headers, _encode(body)) as events:
                async for event in events:
                    data = data_of(event)
                    if data not in (b"", b"[DONE]") and (followed := _followed(joint, data, engine)):
                        await reply.event(followed)
        except EngineFailed as error:
            if not joint.is_over:  # else nothing but the usage is missing
                raise
            logger.warning("%s", error)
        if not joint.is_over:
            raise EngineFailed(f"{engine.url} ended its answer early")

    async def _relay(self, route: _Route, told: Json | None) -> None:
        """Passes on what an engine says to the request itself."""

        async def relay(engine: Engine) -> None:
            body = with_hand_over(route.call.body, told if engine is route.decoder else None)
            if route.call.is_streamed:
                await self._relay_events(engine, route.call, body, route.reply)
            else:
                await route.reply.answer(await self._ask_plainly(engine, route.call, body))

        await self._try(self._decode, route, route.decoder, relay)

    async def _relay_events(self, engine: Engine, call: Call, body: Json, reply: Reply) -> None:
        last = b""
        try:
            async with self._upstreams[engine].stream(call.path, call.headers, _encode(body)) as events:
                async for last in events:
                    await reply.event(last)
            if last != DONE:
                raise EngineFailed(f"{engine.url} ended its answer early")
        except EngineFailed as error:
            error.is_final = bool(reply.status)  # what the client has cannot be taken back
            raise
        await reply.end()

    async def _ask_plainly(self, engine: Engine, call: Call, body: Json) -> Answer:
        """An engine's answer as it is, but for words on hand-overs."""
        answer = await self._upstreams[engine].ask("POST", call.path, call.headers, _encode(body))
        if b'"lmkv"' not in answer.body:
            return answer
        said = _decode(answer.body, engine)
        learn(engine, said)
        return Answer(status=200, body=_encode(without_hand_over(said)), headers=answer.headers)

    async def _ask(self, engine: Engine, call: Call, body: Json) -> Json:
        answer = await self._upstreams[engine].ask("POST", call.path, call.headers, _encode(body))
        said = _decode(answer.body, engine)
        learn(engine, said)
        return said


def _join(call: Call, decoder: Engine, first: Json) -> tuple[Joint | None, str]:
    """What the client's answer begins with; or None, and why the decode engine has to begin anew."""
    try:
        joint = Joint(call.path, call.body, first)
    except NotContinued as error:
        logger.warning("%s", error)
        return None, "first_token"
    limit = decoder.model(call.body.get("model")).max_token_count
    if not joint.fits(limit):
        return None, "max_tokens"
    joint.fill(limit)
    return (joint, "") if joint.is_over or joint.is_seamless else (None, "first_token")


def _joined(joint: Joint, rest: Json, engine: Engine) -> bytes:
    try:
        return joint.whole(rest)
    except NotContinued as error:
        raise EngineFailed(f"{engine.url}: {error}") from None


def _followed(joint: Joint, data: bytes, engine: Engine) -> bytes:
    chunk = _decode(data, engine)
    if "error" in chunk:
        raise EngineFailed(f"{engine.url} broke off: {chunk['error']}", Answer(status=500, body=data))
    try:
        return joint.follow(chunk)
    except NotContinued as error:
        raise EngineFailed(f"{engine.url}: {error}") from None


_encode = msgspec.json.encode


def _decode(data: bytes, engine: Engine) -> Json:
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineFailed(f"{engine.url} answers with what is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise EngineFailed(f"{engine.url} answers with what is no JSON object")
    return content
