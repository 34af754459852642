"""`EngineService`: translates the calls of engines. Served on the node's unix socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from lmkv.errors import BadMessage, ConfigConflict, ModelNotFound
from lmkv.keys import listed_keys
from lmkv.kv_inputs import KvInputs
from lmkv.misses import MissReason
from lmkv.prompt import Prompt
from lmkv.runtime.places import requester
from lmkv.spec import KvSpec
from lmkv.tiers import INSTANCE_TIERS
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc, registry_service_pb2
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.engines.explainer import PromptExplainer
from lmkv_server.node.engines.lookups import LookupCounters
from lmkv_server.node.engines.stream import EngineContext, EngineHost, EngineStream, served_models
from lmkv_server.node.handoff.sender import HandoffSenders
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)

M = TypeVar("M")

HELLO_TIMEOUT_SECONDS = 5.0
MAX_AUDIT_SECONDS = 3600.0
"""Longest time for which a call has every hit audited."""
LAST_COMPARISONS_SECONDS = 2.0
"""Time after it in which comparisons that have begun are still reported."""
UNARY_LOAD_TIMEOUT_SECONDS = 30.0


class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """The handlers. One event loop owns it."""

    def __init__(
        self,
        host: EngineHost,
        sessions: EngineSessions,
        stack: TierStack,
        hints: HintExecutor,
        audits: Audits,
        senders: HandoffSenders | None = None,
    ) -> None:
        """`senders` are the handoffs from this node; None without peers."""
        self.lookups = LookupCounters()
        self.explainer = PromptExplainer(sessions, stack, host.welcome().epoch)
        """Says where prompts are, and why parts of them are missed."""
        self._context = EngineContext(
            host=host,
            sessions=sessions,
            stack=stack,
            hints=hints,
            senders=senders,
            counters=self.lookups,
            explainer=self.explainer,
            audits=audits,
        )
        self._host = host
        self._audits = audits
        self._sessions = sessions
        self._stack = stack
        self._buffers = stack.buffers
        self._streams: set[EngineStream] = set()
        self._followers: set[EngineStream] = set()
        """Streams of engines that want to know which chunks the node holds."""

    def report_conflicts(self, conflicts: list[registry_service_pb2.SpecConflict]) -> None:
        """Reports to every engine the instances with which its node shares nothing, and why."""
        for stream in self._streams:
            stream.outbox.put(pb.Event(conflicts=pb.SpecConflicts(conflicts=conflicts)))

    def report_peer(self, connected: pb.PeerConnected, fingerprint: bytes) -> None:
        """Reports a connected peer to the engines of the spec that it shares."""
        for stream in self._streams:
            if stream.fingerprint == fingerprint:
                stream.outbox.put(pb.Event(peer_connected=connected))

    # --- `CacheListener` -----------------------------------------------------------------------------------------

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Reports the chunk to the engines of its spec that want to know."""
        self._changed(tier, chunk, held=True)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        """Reports that a tier no longer has the chunk, to the same engines."""
        self._changed(tier, chunk, held=False)

    def _changed(self, tier: str, chunk: CachedChunk, *, held: bool) -> None:
        if not self._followers or tier not in INSTANCE_TIERS:
            return
        for stream in self._followers:
            if stream.fingerprint == chunk.fingerprint:
                stream.outbox.changed(tier, chunk.key, held=held)

    # --- Handlers ------------------------------------------------------------------------------------------------

    def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Any
    ) -> AsyncIterator[pb.AttachResponse]:
        """Serves one engine until its stream ends; the response iterator ends with it."""
        return self.attach(request_iterator)

    async def attach(self, requests: AsyncIterator[pb.AttachRequest]) -> AsyncGenerator[pb.AttachResponse, None]:
        """As `Attach`, for any transport. Raises the `LmkvError` with which the stream ends."""
        first = await _first(requests)
        if first is None or not (first.acts and first.acts[0].HasField("hello")):
            raise BadMessage("the first act must be hello", field="acts")
        hello = first.acts[0].hello
        self._check_config(hello.engine_id, dict(hello.expected_config))
        spec = KvSpec.from_proto(hello.spec)
        served = served_models(hello.served_models, spec)
        inputs = KvInputs.from_proto(hello.kv_inputs)
        session = self._sessions.attach(hello.engine_id, spec, max(1, hello.worker_count), inputs=inputs)
        self._sessions.served.announce(session.engine_id, served)
        self._context.forget_old_versions(spec)
        stream = EngineStream(self._context, session, wants_tier_changes=hello.wants_tier_changes)
        self._streams.add(stream)
        if hello.wants_tier_changes:
            self._followers.add(stream)
        self._host.engines_changed()
        logger.info("engine %s attached: %s", session.engine_id, session.spec.model_name)
        context = copy_context()
        context.run(requester.set, f"engine:{session.engine_id}")
        reader = asyncio.create_task(stream.read(first, requests), context=context)
        reader.add_done_callback(lambda _: stream.outbox.end())
        try:
            welcome = self._host.welcome()
            welcome.credit_limit = session.credit_limit
            welcome.device_buffer_bytes = self._buffers.size_bytes if self._buffers else 0
            conflicts = pb.SpecConflicts(conflicts=self._host.conflicts)
            yield pb.AttachResponse(events=[pb.Event(welcome=welcome), pb.Event(conflicts=conflicts)])
            while message := await stream.outbox.take():
                yield message
            await reader  # raises what ended it
        finally:
            if not reader.cancel() and not reader.cancelled():
                reader.exception()  # known, also if the stream ended before it was raised
            self._streams.discard(stream)
            self._followers.discard(stream)
            stream.close()
            if self._buffers:
                self._buffers.remove(session.engine_id)
            self._sessions.detach(session)
            self._host.engines_changed()
            logger.info("engine %s detached", session.engine_id)

    async def Lend(
        self, request_iterator: AsyncIterator[pb.LendRequest], context: Any
    ) -> AsyncIterator[pb.LendResponse]:
        """Serves one worker's part of a device buffer until its stream ends."""
        first = await _first(request_iterator)
        if first is None or not first.HasField("part"):
            raise BadMessage("the first message must carry part")
        if self._buffers is None:
            raise BadMessage("this node has no peers: set enable_p2p")
        part = self._buffers.lend(first.part)
        listener = asyncio.create_task(part.receive(request_iterator))
        listener.add_done_callback(lambda _: part.end())
        try:
            while order := await part.take():
                yield pb.LendResponse(reads=[order])
            if listener.done():
                await listener  # raises what ended it
        finally:
            listener.cancel()
            self._buffers.close(part.buffer)

    def _check_config(self, engine_id: str, expected: dict[str, str]) -> None:
        """Raises `ConfigConflict` if the engine expects another configuration; ends this node if it may be replaced."""
        config = self._host.comparison()
        for key, value in expected.items():
            actual = config.get(key)
            if actual == value:
                continue
            node, engine_count = self._host.welcome(), self._sessions.mapped_count
            conflict = (
                f"{key}: the engine expects {value!r}, the running node of instance {node.instance_id} has {actual!r}"
            )
            fix = "give each engine its own instance_id, or set node_address to share that node"
            if replaced := engine_count == 0 and self._host.is_replaceable:
                fix = "no engine is attached to that node, so it ends"
                self._host.replace(f"engine {engine_id!r} replaces this node ({conflict})")
            elif engine_count == 0:
                fix += f"; no engine started that node, so no engine stops it: its process is {node.node_pid}"
            raise ConfigConflict(
                f"{conflict}; {fix}",
                key=key,
                expected=value,
                actual=actual,
                node_pid=node.node_pid,
                engine_count=engine_count,
                replaced=str(replaced).lower(),
            )

    async def Lookup(self, request: pb.EngineServiceLookupRequest, context: Any) -> pb.EngineServiceLookupResponse:
        """Looks a prompt up in the pool and the tiers behind it. Holds nothing."""
        found = await self._stack.find(self._prompt(request))
        return pb.EngineServiceLookupResponse(
            own_chunk_count=len(found.own),
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in found.runs],
            peer_instance_id=found.source,
            hit_chunk_count=found.chunk_count,
        )

    async def Load(self, request: pb.LoadRequest, context: Any) -> pb.LoadResponse:
        """Brings chunks into the pool from the tiers behind it. Holds nothing."""
        prompt = self._prompt(request)
        found = await self._stack.find(prompt)
        fetched = await self._stack.load(
            found,
            range(len(found.own), len(found.items)),
            UNARY_LOAD_TIMEOUT_SECONDS,
            lambda chunks: self._stack.tier.unhold(chunk for _, chunk in chunks),
        )
        held = self._stack.begin(prompt, self._stack.tier.size_bytes).result()
        return pb.LoadResponse(chunk_count=held.chunk_count, transferred_bytes=fetched.size_bytes)

    async def Audit(self, request: pb.AuditRequest, context: Any) -> AsyncIterator[pb.AuditResponse]:
        """Has the engines audit each hit for a time; the comparisons as they are made."""
        seconds = request.duration.ToNanoseconds() / 1e9
        if not 0 < seconds <= MAX_AUDIT_SECONDS:
            raise BadMessage(f"duration must be positive and at most {MAX_AUDIT_SECONDS:.0f} s", field="duration")
        if request.chunk_count < 0:
            raise BadMessage("chunk_count is negative", field="chunk_count")
        left, ends_at = request.chunk_count, time.monotonic() + seconds + LAST_COMPARISONS_SECONDS
        try:
            with self._audits.watched() as watch, suppress(TimeoutError):
                self._audit_hits(seconds)
                yield pb.AuditResponse(engine_count=len(self._streams))
                while left > 0 or not request.chunk_count:
                    report = await asyncio.wait_for(watch.reports.get(), ends_at - time.monotonic())
                    left -= report.audited.chunk_count
                    yield pb.AuditResponse(
                        engine_count=len(self._streams), audited=report.audited, record=report.record
                    )
        finally:
            if not self._audits.is_watched:
                self._audit_hits(0)

    def _audit_hits(self, seconds: float) -> None:
        event = pb.Event(audit_hits=pb.AuditHits())
        event.audit_hits.duration.FromNanoseconds(int(seconds * 1e9))
        for stream in self._streams:
            stream.outbox.put(event)

    def _prompt(self, request: pb.EngineServiceLookupRequest | pb.LoadRequest) -> Prompt:
        return Prompt(self._spec(request.fingerprint), listed_keys(request.chunk_keys))

    async def Release(self, request: pb.EngineServiceReleaseRequest, context: Any) -> pb.EngineServiceReleaseResponse:
        count = self._sessions.session(request.engine_id).release(request.lookup_id)
        return pb.EngineServiceReleaseResponse(chunk_count=count)

    def _spec(self, fingerprint: bytes) -> KvSpec:
        spec = self._sessions.spec(fingerprint)
        if spec is None:
            raise ModelNotFound(
                f"no engine of fingerprint {fingerprint.hex()} has attached", fingerprint=fingerprint.hex()
            )
        return spec


async def _first(messages: AsyncIterator[M]) -> M | None:
    """The first message of a stream; None if none comes in time."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            return await anext(messages, None)
    except TimeoutError:
        return None
