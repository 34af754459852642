"""`EngineService`: translates the calls of engines. Served on the node's unix socket.

`PromptExplainer` says where a prompt is for this node, why parts of it are not, and what engines reported of requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from lmkv.errors import BadMessage, ConfigConflict, Full, KvSpecMismatch, ModelNotFound
from lmkv.internal.v1.report_service_pb2 import ExplainOrder
from lmkv.keys import ChunkKey, listed_keys, split_keys
from lmkv.misses import MissReason
from lmkv.prompt import Prompt
from lmkv.runtime.places import requester
from lmkv.spec import MAX_SERVED_MODELS, KvSpec, ServedModel
from lmkv.tiers import HOST, INSTANCE_TIERS, OWN
from lmkv.v1 import chunk_pb2, engine_service_pb2_grpc, registry_service_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PromptExplanation, PromptSpan, RequestReport
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.engines.lookups import LookupCounters, missed_span
from lmkv_server.node.engines.outbox import ChangeFeed, TierKey
from lmkv_server.node.engines.stream import EngineStream
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.handoff.sender import HandoffSenders
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)

MAX_REPORTS = 1000
"""Reports of requests that the node keeps, the last ones."""
MAX_REPORT_BYTES = 2048
"""Size of a report that the node keeps: some 50 spans, far more than prompts have."""
MAX_LISTED = 20
"""Requests in one answer."""
MAX_RUNNING = 4
"""Explanations of prompts at a time: each may ask tiers for thousands of chunks."""


class PromptExplainer:
    """Answers `ExplainOrder`s. One event loop owns it."""

    def __init__(self, tier: HostTier, sessions: EngineSessions, stack: TierStack, start_time_ns: int) -> None:
        """`start_time_ns`: when the node started, in nanoseconds since 1970."""
        self._tier = tier
        self._sessions = sessions
        self._stack = stack
        self._start_time_ns = start_time_ns
        self._reports: deque[RequestReport] = deque(maxlen=MAX_REPORTS)
        self._running_count = 0

    def note(self, report: RequestReport) -> None:
        """Keeps what an engine reports of a request, unless that is too large."""
        if report.ByteSize() <= MAX_REPORT_BYTES:
            self._reports.append(report)

    async def explain(self, order: ExplainOrder) -> PromptExplanation:
        """The spans of the order's chunks, or the requests that it names.

        Raises `BadChunkKey`, `KvSpecMismatch` if no engine of the chunks' spec has attached, and `Full` if others are
        explained now.
        """
        found = PromptExplanation()
        found.start_time.FromNanoseconds(self._start_time_ns)
        if order.chunk_keys:
            if self._running_count >= MAX_RUNNING:
                raise Full(f"{MAX_RUNNING} prompts are being explained here already", limit=MAX_RUNNING)
            self._running_count += 1
            try:
                found.spans.extend(await self._spans(order.fingerprint, split_keys(order.chunk_keys)))
            finally:
                self._running_count -= 1
        elif order.engine_request_id:
            named = [
                report for report in reversed(self._reports) if order.engine_request_id in report.engine_request_id
            ]
            found.requests.extend(named[:MAX_LISTED])
        for span in (*found.spans, *(span for report in found.requests for span in report.spans)):
            if span.tier == OWN:  # `own` only to the node's engines
                span.tier = HOST
        return found

    async def _spans(self, fingerprint: bytes, keys: Sequence[ChunkKey]) -> list[PromptSpan]:
        spec = self._sessions.spec(fingerprint)
        if spec is None:
            raise KvSpecMismatch(f"no engine of fingerprint {fingerprint.hex()} has attached here", field="fingerprint")
        prompt = Prompt(spec, keys)
        found = await self._stack.find(prompt)
        spans = [PromptSpan(chunk_count=count, tier=tier) for count, tier in _places(found) if count]
        missed = self._stack.diagnosis.behind(prompt, found.chunk_count, unanswered=found.unanswered)
        spans += [missed_span(run) for run in missed]
        for span in spans:
            span.token_count = span.chunk_count * spec.chunk_size
        return spans


def _places(found: Found) -> list[tuple[int, str]]:
    """Chunks and their tiers. A hit that is all or nothing counts as held in the last tier that it needs."""
    if found.prompt.spec.matches_prefixes:
        return [(len(found.own), OWN), *((run.chunk_count, run.tier) for run in found.runs)]
    return [(found.chunk_count, found.runs[-1].tier if found.runs else OWN)]


M = TypeVar("M")

HELLO_TIMEOUT_SECONDS = 5.0
UNARY_LOAD_TIMEOUT_SECONDS = 30.0


class EngineService(engine_service_pb2_grpc.EngineServiceServicer):
    """Handlers. `welcome` is sent to every engine; `config` is compared with what an engine expects of its node."""

    def __init__(
        self,
        *,
        tier: HostTier,
        sessions: EngineSessions,
        stack: TierStack,
        hints: HintExecutor,
        senders: HandoffSenders | None = None,
        welcome: pb.Welcome,
        config: dict[str, str],
        on_attach: Callable[[], None],
        on_detach: Callable[[], None],
        on_replace: Callable[[str], None] | None = None,
        on_served: Callable[[], None] = lambda: None,
        conflicts: Callable[[], Sequence[registry_service_pb2.SpecConflict]] = tuple,
        snapshot: Callable[[], Iterable[HeldChunk]] = tuple,
    ) -> None:
        """`conflicts` returns the instances of the same models that share nothing with this one.

        `snapshot` returns the chunks that the node holds; it is a listener of what changes there.

        `on_replace` ends the node in favor of one that an engine starts; None if engines may not replace it.
        """
        self.lookups = LookupCounters()
        self.explainer = PromptExplainer(tier, sessions, stack, welcome.epoch)
        """Says where prompts are, and why parts of them are missed."""
        self._tier = tier
        self._sessions = sessions
        self._stack = stack
        self._senders = senders
        self._welcome = welcome
        self._config = config
        self._on_attach = on_attach
        self._on_detach = on_detach
        self._on_replace = on_replace
        self._on_served = on_served
        self._conflicts = conflicts
        self._buffers = stack.buffers
        self._snapshot = snapshot
        self._hints = hints
        self._streams: set[EngineStream] = set()
        self._followers: set[EngineStream] = set()
        """Streams of engines that want to know which chunks the node holds."""

    def report_conflicts(self, conflicts: list[registry_service_pb2.SpecConflict]) -> None:
        """Reports to every engine the instances with which its node shares nothing, and why."""
        for stream in self._streams:
            stream.outbox.put(pb.Event(conflicts=pb.SpecConflicts(conflicts=conflicts)))

    # --- `CacheListener` -----------------------------------------------------------------------------------------

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Reports the chunk to the engines of its spec that want to know."""
        self._changed(tier, chunk, held=True)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        """As `stored`."""
        self._changed(tier, chunk, held=False)

    def _changed(self, tier: str, chunk: CachedChunk, *, held: bool) -> None:
        if not self._followers or tier not in INSTANCE_TIERS:
            return
        for stream in self._followers:
            if stream.fingerprint == chunk.fingerprint:
                stream.outbox.changed(tier, chunk.key, held=held)

    def _held(self, fingerprint: bytes) -> Iterator[TierKey]:
        return ((held.tier, held.key) for held in self._snapshot() if held.fingerprint == fingerprint)

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
        session = self._sessions.attach(hello.engine_id, spec, max(1, hello.worker_count))
        self._sessions.served.announce(session.engine_id, served)
        self._forget_old_versions(spec)
        stream = EngineStream(
            self._tier,
            session,
            self._stack,
            self._hints,
            self.lookups,
            self._senders,
            on_served=partial(self._serve, session),
            on_report=self.explainer.note,
            changes=ChangeFeed(lambda: self._held(session.spec.fingerprint)) if hello.wants_tier_changes else None,
            on_weights=partial(self._change_weights, session),
        )
        self._streams.add(stream)
        if hello.wants_tier_changes:
            self._followers.add(stream)
        self._on_attach()
        logger.info("engine %s attached: %s", session.engine_id, session.spec.model_name)
        context = copy_context()
        context.run(requester.set, f"engine:{session.engine_id}")
        reader = asyncio.create_task(stream.read(first, requests), context=context)
        reader.add_done_callback(lambda _: stream.outbox.end())
        try:
            welcome = pb.Welcome()
            welcome.CopyFrom(self._welcome)
            welcome.credit_limit = session.credit_limit
            welcome.device_buffer_bytes = self._buffers.size_bytes if self._buffers else 0
            conflicts = pb.SpecConflicts(conflicts=self._conflicts())
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
            self._on_detach()
            logger.info("engine %s detached", session.engine_id)

    def _serve(self, session: EngineSession, messages: Sequence[chunk_pb2.ServedModel]) -> None:
        """Registers further names under which an engine serves. Raises `BadKvSpec`."""
        if self._sessions.served.announce(session.engine_id, served_models(messages, session.spec)):
            self._on_served()

    def _change_weights(self, session: EngineSession, version: str) -> None:
        """An engine has other weights now. Raises `BadKvSpec`."""
        self._sessions.change_weights(session, version)
        self._forget_old_versions(session.spec)
        logger.info("engine %s has weights of version %s", session.engine_id, version)
        self._on_served()

    def _forget_old_versions(self, spec: KvSpec) -> None:
        for old in self._sessions.drop_old_versions(spec):
            self._stack.forget(old)

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
        for key, value in expected.items():
            actual = self._config.get(key)
            if actual == value:
                continue
            node, engine_count = self._welcome, self._sessions.mapped_count
            conflict = (
                f"{key}: the engine expects {value!r}, the running node of instance {node.instance_id} has {actual!r}"
            )
            fix = "give each engine its own instance_id, or set node_address to share that node"
            if replaced := engine_count == 0 and self._on_replace is not None:
                fix = "no engine is attached to that node, so it ends"
                self._on_replace(f"engine {engine_id!r} replaces this node ({conflict})")
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
            lambda chunks: self._tier.unhold(chunk for _, chunk in chunks),
        )
        held = self._stack.begin(prompt, self._tier.size_bytes).result()
        return pb.LoadResponse(chunk_count=held.chunk_count, transferred_bytes=fetched.size_bytes)

    def _prompt(self, request: pb.EngineServiceLookupRequest | pb.LoadRequest) -> Prompt:
        return Prompt(self._spec(request.fingerprint), listed_keys(request.chunk_keys))

    async def Release(self, request: pb.EngineServiceReleaseRequest, context: Any) -> pb.EngineServiceReleaseResponse:
        """Releases one request of an engine."""
        count = self._sessions.session(request.engine_id).release(request.lookup_id)
        return pb.EngineServiceReleaseResponse(chunk_count=count)

    def _spec(self, fingerprint: bytes) -> KvSpec:
        spec = self._sessions.spec(fingerprint)
        if spec is None:
            raise ModelNotFound(
                f"no engine of fingerprint {fingerprint.hex()} has attached", fingerprint=fingerprint.hex()
            )
        return spec


def served_models(messages: Sequence[chunk_pb2.ServedModel], spec: KvSpec) -> list[ServedModel]:
    """The last names that an engine of a spec sends in a message. Raises `BadKvSpec` if one is empty or too long."""
    return [
        ServedModel(name=message.name, fingerprint=spec.fingerprint, lora_identity=message.lora_identity)
        for message in messages[-MAX_SERVED_MODELS:]
    ]


async def _first(messages: AsyncIterator[M]) -> M | None:
    """The first message of a stream; None if none comes in time."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
            return await anext(messages, None)
    except TimeoutError:
        return None
