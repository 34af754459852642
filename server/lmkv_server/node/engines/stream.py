"""One engine's `Attach` stream: carries out the acts of its messages, its handoffs and its hints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.duration_pb2 import Duration
from google.protobuf.unknown_fields import UnknownFieldSet

from lmkv import rpc
from lmkv.errors import BadChunkKey, BadMessage, Full, GrantNotFound, LmkvError, Unreachable
from lmkv.hints import HintReason, HintResult, reject
from lmkv.keys import KEY_BYTES, ChunkKey, split_keys
from lmkv.misses import MissReason
from lmkv.rpc.messages import to_proto
from lmkv.spec import MAX_SERVED_MODELS, KvSpec, ServedModel
from lmkv.v1 import chunk_pb2, registry_service_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.engines.explainer import PromptExplainer
from lmkv_server.node.engines.lookups import EngineLoads, EngineLookups, LookupCounters
from lmkv_server.node.engines.outbox import ChangeFeed, Outbox, RequestTasks, TierKey
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.handoff.sender import HandoffResult, HandoffSenders
from lmkv_server.node.handoff.state import HandedPrompt
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.hints.prompt_hint import MAX_ID_BYTES, PromptHint
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)


class EngineHandoffs:
    """One engine's handoffs. They end with its stream: no engine computes their chunks any more."""

    def __init__(
        self, session: EngineSession, stack: TierStack, outbox: Outbox, senders: HandoffSenders | None
    ) -> None:
        """`stack` has the handoffs to this node; `senders` are those from it, None without peers."""
        self._session = session
        self._stack = stack
        self._outbox = outbox
        self._senders = senders
        self._running: dict[str, str] = {}
        """The engine's id of the request, by handoff."""

    def begin(self, handoff: pb.HandChunks) -> None:
        """Begins one. A repeat changes nothing. Raises `BadChunkKey` if its keys make no sense."""
        keys = split_keys(handoff.chunk_keys)
        if handoff.handoff_id in self._running:
            return
        self._running[handoff.handoff_id] = handoff.engine_request_id
        if self._senders is None:
            alone = Unreachable("this node has no peers: set enable_p2p")
            self.handed(HandoffResult(handoff_id=handoff.handoff_id, error=alone))
            return
        prompt = HandedPrompt(
            handoff_id=handoff.handoff_id,
            spec=self._session.spec,
            chunk_keys=keys,
            token_count=handoff.token_count,
        )
        self._senders.start(prompt, handoff.decode_instance_id, self, handoff.traceparent)

    def end(self, ended: pb.EndHandoff) -> None:
        """No chunk of it will be committed any more."""
        if self._senders and ended.handoff_id in self._running:
            self._senders.end(ended.handoff_id)

    def drop(self, dropped: pb.DropHandoff) -> None:
        """No request will load it: of the prefill's side if it names the decode's instance, else of the decode's."""
        if not dropped.decode_instance_id:
            self._stack.drop_handoff(dropped.handoff_id)
        elif self._senders is not None:
            self._senders.drop(dropped.handoff_id, dropped.decode_instance_id)

    def close(self) -> None:
        """Ends all: the engine is gone, or has other weights."""
        for handoff_id in list(self._running):
            if self._senders:
                self._senders.cancel(handoff_id)
        self._running.clear()

    def handed(self, result: HandoffResult) -> None:
        """Reports to the engine how a handoff has ended."""
        message = pb.HandedChunks(
            handoff_id=result.handoff_id,
            engine_request_id=self._running.pop(result.handoff_id, ""),
            chunk_count=result.chunk_count,
            transferred_bytes=result.size_bytes,
            transfer_duration=Duration(seconds=int(result.seconds), nanos=int(result.seconds % 1 * 1e9)),
            status=rpc.to_status(result.error) if result.error else None,
        )
        self._outbox.put(pb.Event(handed=message))


MAX_LOOKUPS = 64
"""Most prefetches of one engine that wait for their answers."""


class EngineHints:
    """Answers each hint. A malformed one is rejected, and does not end the stream."""

    def __init__(self, session: EngineSession, executor: HintExecutor, outbox: Outbox) -> None:
        self._session = session
        self._executor = executor
        self._outbox = outbox
        self._lookups = RequestTasks()

    def hint(self, message: pb.HintChunks) -> None:
        """Carries out a hint; a prefetch is answered when it is known what can be brought."""
        session = self._session
        try:
            hint = PromptHint.read(
                message, session.spec, engine_id=session.engine_id, owner=message.root_key, is_running=message.running
            )
        except (BadMessage, BadChunkKey) as error:
            self._answer(message, reject("", "", HintReason.MALFORMED, str(error)))
            return
        if not hint.action.brings_chunks:
            self._answer(message, self._executor.apply(hint))
        elif len(self._lookups) >= MAX_LOOKUPS:
            self._answer(message, hint.rejected(HintReason.QUOTA, f"{MAX_LOOKUPS} prefetches of this engine wait"))
        else:
            self._lookups.cancel(hint.hint_id)
            self._lookups.start(hint.hint_id, self._prefetch(message, hint))

    def close(self) -> None:
        """Ends what still waits for an answer. Prefetches that have begun continue."""
        self._lookups.close()

    async def _prefetch(self, message: pb.HintChunks, hint: PromptHint) -> None:
        self._answer(message, await self._executor.prefetch(hint))

    def _answer(self, message: pb.HintChunks, result: HintResult) -> None:
        answer = pb.HintedChunks(hint_id=message.hint_id[:MAX_ID_BYTES], result=to_proto(result))
        self._outbox.put(pb.Event(hinted=answer))


ACTS_AT_ONCE = 64
"""Acts that are carried out before other engines, peers and coordinators have their turn."""


class EngineHost(Protocol):
    """The node as engines' streams see it. Its implementation, `Node`, imports this package: the floor stays."""

    @property
    def conflicts(self) -> Sequence[registry_service_pb2.SpecConflict]:
        """The instances of the same models that share nothing with this one."""

    @property
    def is_replaceable(self) -> bool:
        """Whether an engine may end a node without engines in favor of its own."""

    def welcome(self) -> pb.Welcome:
        """The message that every engine receives first, without what differs by engine."""

    def comparison(self) -> Mapping[str, str]:
        """The configuration, to compare with what an engine expects of its node."""

    def engines_changed(self) -> None:
        """An engine has attached or detached."""

    def served_changed(self) -> None:
        """The names under which engines serve have changed, or the version of their weights."""

    def replace(self, reason: str) -> None:
        """Ends this node, so that an engine can start its own."""

    def snapshot(self) -> Iterable[HeldChunk]:
        """Every chunk that the node holds now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContext:
    """Shared by the streams of all engines of a node."""

    host: EngineHost
    sessions: EngineSessions
    stack: TierStack
    hints: HintExecutor
    senders: HandoffSenders | None
    """The handoffs from this node; None without peers."""
    counters: LookupCounters
    explainer: PromptExplainer
    audits: Audits

    def serve(self, session: EngineSession, messages: Sequence[chunk_pb2.ServedModel]) -> None:
        """Registers further names under which an engine serves. Raises `BadKvSpec`."""
        if self.sessions.served.announce(session.engine_id, served_models(messages, session.spec)):
            self.host.served_changed()

    def change_weights(self, session: EngineSession, version: str) -> None:
        """An engine has other weights now. Raises `BadKvSpec`."""
        self.sessions.change_weights(session, version)
        self.forget_old_versions(session.spec)
        logger.info("engine %s has weights of version %s", session.engine_id, version)
        self.host.served_changed()

    def forget_old_versions(self, spec: KvSpec) -> None:
        """Begins to drop the chunks of earlier weights of the model that no engine has any more."""
        for old in self.sessions.drop_old_versions(spec):
            self.stack.forget(old)

    def held(self, session: EngineSession) -> Iterator[TierKey]:
        """The chunks of an engine's spec that the node holds now."""
        fingerprint = session.spec.fingerprint
        return ((held.tier, held.key) for held in self.host.snapshot() if held.fingerprint == fingerprint)


def served_models(messages: Sequence[chunk_pb2.ServedModel], spec: KvSpec) -> list[ServedModel]:
    """The last names that an engine of a spec sends in a message. Raises `BadKvSpec` if one is empty or too long."""
    return [
        ServedModel(name=message.name, fingerprint=spec.fingerprint, lora_identity=message.lora_identity)
        for message in messages[-MAX_SERVED_MODELS:]
    ]


class EngineStream:
    """Carries out acts in the order in which they arrive."""

    def __init__(self, context: EngineContext, session: EngineSession, *, wants_tier_changes: bool = False) -> None:
        stack = context.stack
        self.outbox = Outbox(ChangeFeed(lambda: context.held(session)) if wants_tier_changes else None)
        self._context = context
        self._session = session
        self._stack = stack
        self._tasks = RequestTasks()
        self._lookups = EngineLookups(session, stack, context.counters, self.outbox, self._tasks)
        self._loads = EngineLoads(session, stack, self._lookups, self.outbox, self._tasks)
        self._handoffs = EngineHandoffs(session, stack, self.outbox, context.senders)
        self._hints = EngineHints(session, context.hints, self.outbox)
        self._handlers: dict[str, Callable[[Any], object]] = {
            "serve_models": lambda act: context.serve(session, act.served_models),
            "release": self._release,
            "commit": self._commit_all,
            "drop_damaged": self._drop_damaged,
            "return_credits": self._return_credits,
            "lookup": self._lookups.lookup,
            "load": self._loads.load,
            "reserve": self._lookups.reserve,
            "hand": self._handoffs.begin,
            "end_handoff": self._handoffs.end,
            "drop_handoff": self._handoffs.drop,
            "reset": self._reset,
            "change_weights": self._change_weights,
            "report": context.explainer.note,
            "hint": self._hints.hint,
            "audited": self._audited,
        }
        """Carries out each kind of act but `hello`."""

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the engine's spec now."""
        return self._session.spec.fingerprint

    async def read(self, first: pb.AttachRequest, rest: AsyncIterator[pb.AttachRequest]) -> None:
        """Carries out messages until the engine ends the stream."""
        await self.act(first.acts[1:])
        async for message in rest:
            await self.act(message.acts)

    async def act(self, acts: Sequence[pb.Act]) -> None:
        """Carries out the acts of one message; others have their turn between them.

        Raises `BadChunkKey` or `BadMessage` if an act is malformed or unknown, `Full` if the engine does not read its
        answers: that ends the stream.
        """
        if self.outbox.is_full:
            raise Full("the engine does not read the answers to its messages", retry_seconds=1)
        for number, act in enumerate(acts, 1):
            kind = act.WhichOneof("act")
            if kind is None or (handler := self._handlers.get(kind)) is None:
                raise _refusal(act)
            handler(getattr(act, kind))
            if number % ACTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def close(self) -> None:
        """Cancels everything that still runs for the engine."""
        self._tasks.close()
        self._handoffs.close()
        self._hints.close()

    def _release(self, release: pb.ReleaseChunks) -> None:
        self._tasks.cancel(release.lookup_id)
        self._lookups.release(release.lookup_id)
        self._session.release(release.lookup_id)
        if release.HasField("avoided_prefill_duration"):
            self._context.counters.add_load(
                load_seconds=release.load_duration.ToNanoseconds() / 1e9,
                avoided_prefill_seconds=release.avoided_prefill_duration.ToNanoseconds() / 1e9,
            )

    def _commit_all(self, commits: pb.CommitChunks) -> None:
        for commit in commits.chunks:
            if self.fingerprint in self._stack.stopped:
                self._return_credits(pb.ReturnCredits(offsets=[commit.offset]))
            else:
                self._commit(commit)

    def _commit(self, commit: pb.CommitChunk) -> None:
        key = _key(commit.chunk_key, "chunk_key")
        parent = _key(commit.parent_key, "parent_key") if commit.parent_key else None
        superseded = _key(commit.superseded_key, "superseded_key") if commit.superseded_key else None
        owner = _key(commit.owner_key, "owner_key") if commit.owner_key else b""
        try:
            written = Chunk(
                key=key,
                fingerprint=self._session.spec.fingerprint,
                offset=commit.offset,
                size_bytes=commit.size_bytes,
                checksum=commit.checksum,
                token_count=commit.token_count,
                parent=parent,
                prefix_digests=commit.prefix_digests,
                owner=owner,
                origin=self._session.origin,
            )
            self._session.commit(written, part=commit.part, superseded=superseded)
        except LmkvError as error:
            rejected = pb.RejectedCommit(chunk_key=commit.chunk_key, status=rpc.to_status(error))
            self.outbox.put(pb.Event(rejected_commit=rejected))

    def _drop_damaged(self, damaged: pb.DropDamagedChunks) -> None:
        dropped_count = self._stack.tier.drop(split_keys(damaged.chunk_keys), MissReason.DAMAGED)
        logger.warning("engine %s found %d chunks damaged; they are dropped", self._session.engine_id, dropped_count)

    def _audited(self, audited: pb.AuditedChunks) -> None:
        self._context.audits.note(self._session, audited)

    def _return_credits(self, returned: pb.ReturnCredits) -> None:
        for offset in returned.offsets:
            try:
                self._session.return_credit(offset)
            except GrantNotFound as error:  # of an earlier attachment: no longer valid
                logger.warning("%s", error)

    def _change_weights(self, change: pb.ChangeWeights) -> None:
        self._handoffs.close()  # their chunks are of the old version
        self._context.change_weights(self._session, change.weight_version)
        self.outbox.restart_changes()

    def _reset(self, _: pb.ResetChunks) -> None:
        self._tasks.start("", self._report_reset(self._stack.clear(self._session.spec.fingerprint)))

    async def _report_reset(self, cleared: Awaitable[int]) -> None:
        self.outbox.put(pb.Event(reset=pb.ResetResult(chunk_count=await cleared)))


def _refusal(act: pb.Act) -> BadMessage:
    """Returns the error for an act that has no handler."""
    if act.HasField("hello"):
        return BadMessage("hello may be sent only once", field="acts")
    if len(unknown := UnknownFieldSet(act)):
        number = unknown[0].field_number
        return BadMessage(
            f"an act has field {number} of lmkv.v1.Act, which this node does not know: update the node, or use an "
            "engine of its version",
            field="acts",
            field_number=number,
        )
    return BadMessage("an act is empty: it has none of the fields of lmkv.v1.Act", field="acts")


def _key(raw: bytes, field: str) -> ChunkKey:
    if len(raw) != KEY_BYTES:
        raise BadChunkKey(f"{field} has {len(raw)} bytes, not {KEY_BYTES}", field=field)
    return ChunkKey(raw)
