"""One engine's `Attach` stream: carries out the acts of its messages. Used by `EngineService`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lmkv import rpc
from lmkv.attach_order import ATTACH_ORDER
from lmkv.errors import BadChunkKey, BadMessage, Full, GrantNotFound, LmkvError
from lmkv.keys import KEY_BYTES, ChunkKey, listed_keys
from lmkv.misses.reason import MissReason
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.engines.change_feed import ChangeFeed
from lmkv_server.node.engines.handoffs import EngineHandoffs
from lmkv_server.node.engines.hints import EngineHints
from lmkv_server.node.engines.loads import EngineLoads
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.lookups import EngineLookups
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.handoff.senders import HandoffSenders
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)


class EngineStream:
    """Carries out messages in the order in which they arrive, and the acts of each in the order of `ATTACH_ORDER`."""

    def __init__(
        self,
        tier: HostTier,
        session: EngineSession,
        stack: TierStack,
        hints: HintExecutor,
        counters: LookupCounters,
        senders: HandoffSenders | None = None,
        *,
        on_served: Callable[[Sequence[chunk_pb2.ServedModel]], None] = lambda _: None,
        on_weights: Callable[[str], None] = lambda _: None,
        on_reports: Callable[[Sequence[chunk_pb2.RequestReport]], None] = lambda _: None,
        changes: ChangeFeed | None = None,
    ) -> None:
        """`on_served` is called with further names under which the engine serves, `on_weights` with the version of its
        weights when they have changed, and `on_reports` with what it reports of requests.

        `changes` are sent to the engine.
        """
        self.outbox = Outbox(changes)
        self._tier = tier
        self._counters = counters
        self._session = session
        self._stack = stack
        self._tasks = RequestTasks()
        self._lookups = EngineLookups(session, stack, counters, self.outbox, self._tasks)
        self._loads = EngineLoads(session, stack, self._lookups, self.outbox, self._tasks)
        self._handoffs = EngineHandoffs(lambda: session.spec, senders, self.outbox.put, stack.drop_handoff)
        self._on_weights = on_weights
        self._hints = EngineHints(session, hints, self.outbox)
        self._handlers: dict[str, Callable[[Any], object]] = {
            "served_models": on_served,
            "releases": each(self._release),
            "commits": each(self._commit),
            "damaged_keys": self._drop_damaged,
            "returned_credits": each(self._return_credit),
            "lookups": each(self._lookups.lookup),
            "loads": each(self._loads.load),
            "reserve_count": self._reserve,
            "handoffs": each(self._handoffs.begin),
            "ended_handoffs": each(self._handoffs.end),
            "dropped_handoffs": each(self._handoffs.drop),
            "reset": self._reset,
            "part_reserve_counts": self._lookups.reserve_parts,
            "weight_version": self._change_weights,
            "reports": on_reports,
            "hints": each(self._hints.hint),
            "partial_reserves": self._lookups.reserve_partial,
            "optional_partial_reserves": partial(self._lookups.reserve_partial, is_optional=True),
        }
        """Carries out each field of `AttachRequest`."""

    @property
    def fingerprint(self) -> bytes:
        """Of the engine's spec at the moment."""
        return self._session.spec.fingerprint

    async def read(self, first: pb.AttachRequest, rest: AsyncIterator[pb.AttachRequest]) -> None:
        """Carries out messages until the engine ends the stream."""
        first.ClearField("hello")
        self.act(first)
        async for message in rest:
            if message.HasField("hello"):
                raise BadMessage("hello may be sent only once")
            self.act(message)

    def act(self, message: pb.AttachRequest) -> None:
        """Carries out the acts of one message.

        Raises `BadChunkKey` or `BadMessage` if an act is malformed, `Full` if the engine does not read its answers:
        that ends the stream.
        """
        if self.outbox.is_full:
            raise Full("the engine does not read the answers to its messages", retry_seconds=1)
        for field in ATTACH_ORDER:
            if acts := getattr(message, field):
                self._handlers[field](acts)

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
            self._counters.add_load(
                load_seconds=release.load_duration.ToNanoseconds() / 1e9,
                avoided_prefill_seconds=release.avoided_prefill_duration.ToNanoseconds() / 1e9,
            )

    def _commit(self, commit: pb.CommitChunk) -> None:
        key = _key(commit.chunk_key, "chunk_key")
        parent = _key(commit.parent_key, "parent_key") if commit.parent_key else None
        superseded = _key(commit.superseded_key, "superseded_key") if commit.superseded_key else None
        try:
            self._session.commit(
                commit.offset,
                key,
                commit.size_bytes,
                commit.checksum,
                commit.token_count,
                parent=parent,
                part=commit.part,
                superseded=superseded,
                prefix_digests=commit.prefix_digests,
            )
        except LmkvError as error:
            rejected = pb.RejectedCommit(chunk_key=commit.chunk_key, status=rpc.to_status(error))
            self.outbox.put(pb.AttachResponse(rejected_commits=[rejected]))

    def _drop_damaged(self, keys: Sequence[bytes]) -> None:
        dropped_count = self._tier.drop(listed_keys(keys, "damaged_keys"), MissReason.DAMAGED)
        logger.warning("engine %s found %d chunks damaged; they are dropped", self._session.engine_id, dropped_count)

    def _return_credit(self, offset: int) -> None:
        try:
            self._session.return_credit(offset)
        except GrantNotFound as error:  # of an earlier attachment: no longer valid
            logger.warning("%s", error)

    def _reserve(self, count: int) -> None:
        if count > 0:
            self._lookups.reserve(count, settled=count)

    def _change_weights(self, version: str) -> None:
        self._handoffs.close()  # their chunks are of the old version
        self._on_weights(version)
        self.outbox.restart_changes()

    def _reset(self, _: bool) -> None:
        self._tasks.start("", self._report_reset(self._stack.clear(self._session.spec.fingerprint)))

    async def _report_reset(self, cleared: Awaitable[int]) -> None:
        self.outbox.put(pb.AttachResponse(reset_counts=[await cleared]))


def each(act: Callable[[Any], object]) -> Callable[[Iterable[Any]], None]:
    """Returns a function that carries out an act for each value of a field."""

    def acts(values: Iterable[Any]) -> None:
        for value in values:
            act(value)

    return acts


def _key(raw: bytes, field: str) -> ChunkKey:
    if len(raw) != KEY_BYTES:
        raise BadChunkKey(f"{field} has {len(raw)} bytes, not {KEY_BYTES}", field=field)
    return ChunkKey(raw)
