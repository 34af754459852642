"""One client's request on its way through the engines: who is asked what, and who is asked when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from lmkv_server.proxy.metrics import Metrics
from lmkv_server.proxy.pd.handoffs import Handoffs, Prefilled
from lmkv_server.proxy.pd.joiner import NotContinued, ResponseJoiner
from lmkv_server.proxy.pd.parameters import (
    ALONE,
    CONTINUE,
    REASONS,
    REPEAT,
    decode_body,
    is_alone,
    prefill_body,
    token_limit,
    why_repeat,
    with_hand_over,
    without_hand_over,
)
from lmkv_server.proxy.routing.engines import Engine, Fleet, Pool
from lmkv_server.proxy.routing.health import learn
from lmkv_server.proxy.routing.lookups import Lookups
from lmkv_server.proxy.statistics import Statistics
from lmkv_server.proxy.upstream.client import Answer, EngineFailed, Refused, Upstream, json_of
from lmkv_server.proxy.upstream.events import DONE, data_of
from lmkv_server.proxy.upstream.failover import EngineFailover, NoEngine
from lmkv_server.proxy.upstream.reply import Reply

logger = logging.getLogger(__name__)

_EARLY = "it ended its answer early"

Json = dict[str, Any]

_encode = msgspec.json.encode


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


class RequestHandler:
    """Serves requests with the engines of a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        upstreams: Mapping[Engine, Upstream],
        lookups: Lookups | None,
        handoffs: Handoffs,
        statistics: Statistics,
        metrics: Metrics,
    ) -> None:
        self._prefill = fleet.prefill
        self._decode = fleet.decode
        self._upstreams = upstreams
        self._lookups = lookups
        self._handoffs = handoffs
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
        with EngineFailover(self._decode, call.session, held, self._metrics) as decoders:
            if self._prefill is None:
                self._count_hit(held, decoders.first)
                await self._relay(call, reply, decoders, None)
                return
            reason = why_repeat(call.body, call.path)
            done = None
            if not is_alone(call.body):
                done = await self._prefilled(call, self._prefill, held, decoders.first, with_tokens=not reason)
            try:
                await self._decode_behind(call, reply, decoders, done, reason)
            finally:
                if done and done.handoff:
                    self._handoffs.end(done.handoff, call.body.get("model"), call.headers)

    async def _decode_behind(
        self, call: Call, reply: Reply, decoders: EngineFailover, done: Prefilled | None, reason: str
    ) -> None:
        """Answers with what the prefill engine has done, and a decode engine where one is needed."""
        if done is None:
            await self._relay(call, reply, decoders, None)
            return
        joint: ResponseJoiner | None = None
        if not reason:
            joint, reason = _join(call, done)
        if joint is not None:
            reply.way = CONTINUE
            await self._go_on(call, reply, decoders, joint, done)
        else:
            reply.way = REPEAT
            self._metrics.repeats.labels(reason if reason in REASONS else "other").inc()
            await self._relay(call, reply, decoders, done)

    async def _held(self, call: Call) -> Mapping[str, int]:
        """Tokens of the prompt that each instance holds, where the policy asks for it."""
        engine = self._decode.least_loaded()
        if self._lookups is None or engine is None or is_alone(call.body):
            return {}
        return await self._lookups.held(self._upstreams[engine], call.path, call.body, call.headers)

    def _count_hit(self, held: Mapping[str, int], engine: Engine) -> None:
        self._metrics.hit_tokens.inc(held.get(engine.instance_id, 0))

    async def _prefilled(
        self, call: Call, pool: Pool, held: Mapping[str, int], decoder: Engine, *, with_tokens: bool
    ) -> Prefilled | None:
        """Has a prefill engine compute the prompt and hand it to the decode engine; None if none does.

        An answer of one token is the prefill engine's alone: nothing is handed over. Without an instance of the decode
        engine there is no handoff, and only such an answer is the prefill engine's. Raises `Refused` if the first token
        is wanted: in any other case the decode engine answers the request itself.
        """
        is_answer = with_tokens and token_limit(call.body, call.path) == 1
        if not (is_answer or decoder.instance_id):
            return None

        async def prefill(engine: Engine) -> Prefilled:
            handoff = None if is_answer else self._handoffs.make(decoder)
            try:
                begin = time.perf_counter()
                body = prefill_body(call.body, handoff.proven if handoff else None, with_tokens=with_tokens)
                answer = await self._ask(engine, call, body)
                seconds = time.perf_counter() - begin
                self._statistics.prefilled(seconds)
                self._metrics.prefill_seconds.observe(seconds)
                count = _prompt_token_count(answer, engine)
            except BaseException:  # the client is gone, or the engine failed: it may have handed over nevertheless
                if handoff:
                    self._handoffs.end(handoff, call.body.get("model"), call.headers)
                raise
            if handoff and self._handoffs.is_refused(engine, answer):
                handoff = None
            if handoff:
                handoff.prompt_token_count = count
            return Prefilled(answer=answer, to=decoder, handoff=handoff)

        try:
            with EngineFailover(pool, call.session, held, self._metrics) as prefillers:
                self._count_hit(held, prefillers.first)
                return await prefillers.ask(prefill)
        except (NoEngine, EngineFailed):
            return None
        except Refused:
            if with_tokens:
                raise
            return None

    async def _go_on(
        self, call: Call, reply: Reply, decoders: EngineFailover, joint: ResponseJoiner, done: Prefilled
    ) -> None:
        """Gives the client the first token, and what a decode engine says behind it."""

        def body_for(engine: Engine) -> Json:
            joint.go_on()
            return decode_body(call.body, call.path, joint.prompt, joint.taken, done.parameters_for(engine))

        async def join(engine: Engine) -> bytes:
            with _continuing(engine):
                rest = await self._ask(engine, call, body_for(engine))
                done.answered_by(engine)
                return joint.whole(rest)

        async def follow(engine: Engine) -> None:
            with _continuing(engine):
                await self._follow(engine, call, body_for(engine), joint, reply, done)

        if not call.is_streamed:
            whole = joint.whole(None) if joint.is_over else await decoders.ask(join)
            await reply.answer(Answer(status=200, body=whole))
            return
        for event in joint.opening():
            await reply.event(event)
        if not joint.is_over:
            await decoders.ask(follow)
        for event in joint.ending():
            await reply.event(event)
        await reply.end()

    async def _follow(
        self, engine: Engine, call: Call, body: Json, joint: ResponseJoiner, reply: Reply, done: Prefilled
    ) -> None:
        """Passes on what a decode engine says behind the tokens that the client has, but for its mark of the end."""
        try:
            async with self._upstreams[engine].stream(call.path, call.headers, _encode(body)) as events:
                async for event in events:
                    data = data_of(event)
                    if data in (b"", b"[DONE]"):
                        continue
                    done.answered_by(engine)
                    chunk = json_of(data, engine)
                    if "error" in chunk:
                        raise EngineFailed(engine, "it ended its answer with an error", Answer(status=500, body=data))
                    if followed := joint.follow(chunk):
                        await reply.event(followed)
        except EngineFailed as error:
            if not joint.is_over:  # else nothing but the usage is missing
                raise
            logger.warning("%s", error)
        if not joint.is_over:
            raise EngineFailed(engine, _EARLY)

    async def _relay(self, call: Call, reply: Reply, decoders: EngineFailover, done: Prefilled | None) -> None:
        """Passes on what an engine says to the request itself."""

        async def relay(engine: Engine) -> None:
            body = with_hand_over(call.body, done.parameters_for(engine) if done else None)
            if call.is_streamed:
                await self._relay_events(engine, call, body, reply, done)
            else:
                answer = await self._ask_plainly(engine, call, body)
                if done:
                    done.answered_by(engine)
                await reply.answer(answer)

        await decoders.ask(relay)

    async def _relay_events(self, engine: Engine, call: Call, body: Json, reply: Reply, done: Prefilled | None) -> None:
        last = b""
        try:
            async with self._upstreams[engine].stream(call.path, call.headers, _encode(body)) as events:
                async for last in events:
                    if done:
                        done.answered_by(engine)
                    await reply.event(last)
            if last != DONE:
                raise EngineFailed(engine, _EARLY)
        except EngineFailed as error:
            error.is_final = bool(reply.status)  # what the client has cannot be taken back
            raise
        await reply.end()

    async def _ask_plainly(self, engine: Engine, call: Call, body: Json) -> Answer:
        """An engine's answer as it is, but for words on hand-overs."""
        answer = await self._upstreams[engine].ask("POST", call.path, call.headers, _encode(body))
        if b'"lmkv"' not in answer.body:
            return answer
        said = json_of(answer.body, engine)
        learn(engine, said)
        return Answer(status=200, body=_encode(without_hand_over(said)), headers=answer.headers)

    async def _ask(self, engine: Engine, call: Call, body: Json) -> Json:
        answer = await self._upstreams[engine].ask("POST", call.path, call.headers, _encode(body))
        said = json_of(answer.body, engine)
        learn(engine, said)
        return said


def _join(call: Call, done: Prefilled) -> tuple[ResponseJoiner | None, str]:
    """What the client's answer begins with; or None, and why the decode engine has to begin anew."""
    try:
        joint = ResponseJoiner(call.path, call.body, done.answer)
    except NotContinued as error:
        logger.warning("the prefill engine's first token is of no use: %s", error)
        return None, "first_token"
    limit = done.to.model(call.body.get("model")).max_token_count
    if not joint.fits(limit):
        return None, "max_tokens"
    joint.fill(limit)
    return (joint, "") if joint.is_over or joint.is_seamless else (None, "first_token")


def _prompt_token_count(answer: Json, engine: Engine) -> int:
    try:
        return int(answer["usage"]["prompt_tokens"])
    except (KeyError, TypeError, ValueError):
        raise EngineFailed(engine, "it does not count the tokens of the prompt") from None


@contextmanager
def _continuing(engine: Engine) -> Iterator[None]:
    """Says of the engine what is wrong with its answer."""
    try:
        yield
    except NotContinued as error:
        raise EngineFailed(engine, str(error)) from None
