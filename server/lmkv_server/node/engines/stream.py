"""One engine's `Attach` stream: carries out what it says, collects what it is told. Used by `EngineService`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc, telemetry
from lmkv.errors import BadChunkKey, BadMessage, GrantNotFound, LmkvError, Unreachable
from lmkv.keys import KEY_BYTES, ChunkKey, split_keys
from lmkv.telemetry import Span
from lmkv.tiers import HANDOFF, Run
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.engines.handoffs import EngineHandoffs
from lmkv_server.node.engines.lookup_stats import LookupCounters
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.handoff.senders import Senders
from lmkv_server.node.sessions.sessions import EngineSession, LookupLease
from lmkv_server.node.sessions.wire import MAX_EXTENTS, credit, extent
from lmkv_server.node.stack import TierStack, found_runs, shifted

logger = logging.getLogger(__name__)


class EngineStream:
    """One engine's stream: carries out its acts, in the order they came, and collects the answers."""

    def __init__(
        self,
        tier: HostTier,
        session: EngineSession,
        sources: TierStack,
        lookups: LookupCounters,
        senders: Senders | None = None,
        *,
        on_served: Callable[[Sequence[chunk_pb2.ServedModel]], None] = lambda _: None,
    ) -> None:
        """`on_served` gets further names under which the engine serves."""
        self.outbox = Outbox()
        self._on_served = on_served
        self._handoffs = EngineHandoffs(session.spec, senders, self.outbox.put, sources.drop_handoff)
        self._tier = tier
        self._session = session
        self._sources = sources
        self._lookups = lookups
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def read(self, first: pb.AttachRequest, rest: AsyncIterator[pb.AttachRequest]) -> None:
        """Carries out messages until the engine ends the stream."""
        first.ClearField("hello")
        self.act(first)
        async for message in rest:
            if message.HasField("hello"):
                raise BadMessage("hello may come only once")
            self.act(message)

    def act(self, message: pb.AttachRequest) -> None:
        """Carries out one message. Raises `BadChunkKey` or `BadMessage` if it makes no sense: that ends the stream."""
        if message.served_models:
            self._on_served(message.served_models)
        for release in message.releases:
            self._release(release.request_id)
        for commit in message.commits:
            self._commit(commit)
        if message.damaged_keys:
            dropped = self._tier.drop(split_keys(b"".join(message.damaged_keys), "damaged_keys"))
            logger.warning("engine %s found %d chunks damaged; they are dropped", self._session.engine_id, dropped)
        for offset in message.returned_credits:
            self._give_back(offset)
        for lookup in message.lookups:
            self._lookup(lookup)
        for load in message.loads:
            self._start(load.request_id, self._load(load))
        if message.reserve_count > 0:
            self._reserve(message.reserve_count, settled=message.reserve_count)
        for handoff in message.handoffs:
            self._handoffs.begin(handoff)
        for request_id in message.ended_handoffs:
            self._handoffs.end(request_id)
        for handoff_drop in message.dropped_handoffs:
            self._handoffs.drop(handoff_drop)
        if message.reset:
            self.outbox.put(pb.AttachResponse(reset_counts=[self._sources.clear(self._session.spec.fingerprint)]))

    def close(self) -> None:
        """Stops everything that still runs for the engine."""
        for task in self._tasks.values():
            task.cancel()
        self._handoffs.close()

    def _start(self, request_id: str, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks[request_id] = task
        task.add_done_callback(lambda done: self._forget(request_id, done))

    def _forget(self, request_id: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is done:
            del self._tasks[request_id]
        if not done.cancelled() and (error := done.exception()):
            logger.error("work for %s failed unexpectedly", request_id, exc_info=error)

    def _release(self, request_id: str) -> None:
        if task := self._tasks.pop(request_id, None):
            task.cancel()
        self._session.release(request_id)

    def _commit(self, commit: pb.CommitChunk) -> None:
        key = _key(commit.chunk_key, "chunk_key")
        parent = _key(commit.parent_key, "parent_key") if commit.parent_key else None
        try:
            self._session.commit(
                commit.offset, key, commit.size_bytes, commit.checksum, commit.token_count, parent=parent
            )
        except LmkvError as error:
            rejected = pb.RejectedCommit(chunk_key=commit.chunk_key, status=rpc.to_status(error))
            self.outbox.put(pb.AttachResponse(rejected_commits=[rejected]))

    def _give_back(self, offset: int) -> None:
        try:
            self._session.give_back(offset)
        except GrantNotFound as error:  # of an earlier attachment: void already
            logger.warning("%s", error)

    def _reserve(self, count: int, *, settled: int) -> None:
        granted = self._session.reserve(count)
        self.outbox.put(pb.AttachResponse(credits=[credit(one) for one in granted], settled_reserve_count=settled))

    def _lookup(self, lookup: pb.LookupChunks) -> None:
        ticket = self._session.open(lookup.request_id, split_keys(lookup.chunk_keys))
        ticket.handoff_id = lookup.handoff_id
        ticket.on_release = self._sources.claim(lookup.handoff_id, self._session.engine_id)
        on_disk = self._sources.on_disk(self._session.spec.fingerprint, ticket.keys, ticket.own_count)
        ticket.disk_count = min(on_disk, self._session.holdable_count)
        span = telemetry.follow("lmkv.lookup", lookup.traceparent, asked_chunks=len(ticket.keys))
        here_count = ticket.own_count + ticket.disk_count
        if here_count == len(ticket.keys) or not self._sources.asks or self._promised(ticket)[0]:
            with span:
                self._answer(lookup, ticket, span)
        else:
            self._start(lookup.request_id, self._locate(lookup, ticket, span))

    async def _locate(self, lookup: pb.LookupChunks, ticket: LookupLease, span: Span) -> None:
        with span:
            ticket.holders = await self._sources.locate(ticket.keys[ticket.own_count :], after=ticket.disk_count)
            here_count = ticket.disk_count + ticket.peer_count
            shared = await self._sources.in_remote(self._session.spec, ticket.keys, ticket.own_count + here_count)
            ticket.remote_count = max(0, min(shared, self._session.holdable_count - here_count))
            self._answer(lookup, ticket, span)

    def _answer(self, lookup: pb.LookupChunks, ticket: LookupLease, span: Span) -> None:
        refused_count = self._refuse_slow(lookup, ticket)
        peer_count, peer_id = self._promised(ticket)
        runs: tuple[Run, ...] = (Run(tier=HANDOFF, chunk_count=peer_count),)
        if not peer_count:
            runs = found_runs(disk=ticket.disk_count, peers=ticket.peer_count, remote=ticket.remote_count)
            peer_id = ticket.holders[0].instance_id if ticket.holders else ""
        found = pb.FoundChunks(
            request_id=lookup.request_id,
            own=[extent(chunk) for chunk in ticket.chunks],
            runs=[pb.Run(tier=run.tier, chunk_count=run.chunk_count) for run in runs],
            peer_instance_id=peer_id,
            refused_chunk_count=refused_count,
        )
        self.outbox.put(pb.AttachResponse(found=[found]))
        self._lookups.add(
            asked_count=len(ticket.keys), own_count=ticket.own_count, runs=runs, refused=refused_count > 0
        )
        span.set(
            own_chunks=ticket.own_count,
            peer_instance_id=found.peer_instance_id,
            **{f"{run.tier}_chunks": run.chunk_count for run in runs},
        )
        held = ticket.own_count + sum(run.chunk_count for run in runs)
        self._reserve(lookup.reserve_count - held, settled=max(0, lookup.reserve_count))
        if not ticket.chunks and not runs:
            self._session.release(lookup.request_id)

    def _promised(self, ticket: LookupLease) -> tuple[int, str]:
        """Chunks that are on their way by a handoff, and whose they are."""
        return self._sources.promised(ticket.handoff_id, ticket.own_count, len(ticket.keys))

    def _refuse_slow(self, lookup: pb.LookupChunks, ticket: LookupLease) -> int:
        """Forgets who holds the rest if to compute it is quicker, as far as that is known; the chunks of it."""
        spec, rate = self._session.spec, lookup.prefill_tokens_per_second

        def is_slower(count: int, expected_seconds: Callable[[int], float | None]) -> bool:
            seconds = expected_seconds(count * spec.chunk_bytes) if count and rate > 0 else None
            return seconds is not None and seconds > count * spec.chunk_size / rate

        refused_count = 0
        if is_slower(ticket.disk_count, self._sources.read_seconds):
            refused_count = ticket.disk_count + ticket.peer_count + ticket.remote_count
            ticket.disk_count, ticket.holders, ticket.remote_count = 0, (), 0
        elif is_slower(ticket.peer_count, lambda size: self._sources.fetch_seconds(ticket.holders, size)):
            refused_count = ticket.peer_count + ticket.remote_count
            ticket.holders, ticket.remote_count = (), 0
        elif is_slower(ticket.remote_count, self._sources.remote_seconds):
            refused_count, ticket.remote_count = ticket.remote_count, 0
        return refused_count

    async def _load(self, load: pb.LoadChunks) -> None:
        with telemetry.follow("lmkv.fetch", load.traceparent, asked_chunks=load.chunk_count) as span:
            await self._fetch(load, span)

    async def _fetch(self, load: pb.LoadChunks, span: Span) -> None:
        ticket = self._session.ticket(load.request_id)
        wanted = slice(load.first_chunk, load.first_chunk + load.chunk_count)
        if ticket is None or load.first_chunk < ticket.own_count:
            refusal = BadMessage("load names no chunks that a lookup found at peers")
            span.fail(refusal.reason, str(refusal))
            self._arrived(load, [], done=True, error=refusal)
            return
        offset = wanted.start - ticket.own_count
        arrived_count = 0

        def on_chunks(chunks: list[tuple[int, Chunk]]) -> None:
            nonlocal arrived_count
            arrived_count += len(chunks)
            arrived = [chunk for _, chunk in chunks]
            if self._session.keep(load.request_id, arrived):
                for start in range(0, len(arrived), MAX_EXTENTS):
                    part = arrived[start : start + MAX_EXTENTS]
                    self._arrived(load, part, first=wanted.start + chunks[0][0] + start)

        holders = [shifted(holder, offset) for holder in ticket.holders]
        try:
            fetched = await self._sources.fetch(
                self._session.spec,
                ticket.keys[wanted],
                [holder for holder in holders if holder.matched_chunk_count > 0],
                load.timeout.ToNanoseconds() / 1e9,
                on_chunks,
                ticket.handoff_id,
            )
        except asyncio.CancelledError:
            if arrived_count < load.chunk_count:
                raise
            span.set(arrived_chunks=arrived_count)  # the engine had all of it, and has released it
            return
        error = fetched.error
        if error is None and fetched.chunk_count < load.chunk_count:
            error = Unreachable("chunks are gone")
        span.set(
            arrived_chunks=fetched.chunk_count,
            transferred_bytes=fetched.size_bytes,
            peer_instance_ids=fetched.instance_ids,
        )
        if error:
            span.fail(error.reason, str(error))
        self._arrived(
            load,
            [],
            done=True,
            error=error,
            peer=",".join(fetched.instance_ids),
            size_bytes=fetched.size_bytes,
            seconds=fetched.seconds,
        )

    def _arrived(
        self,
        load: pb.LoadChunks,
        chunks: list[Chunk],
        *,
        first: int = 0,
        done: bool = False,
        error: LmkvError | None = None,
        peer: str = "",
        size_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        loaded = pb.LoadedChunks(
            request_id=load.request_id,
            first_chunk=first,
            extents=[extent(chunk) for chunk in chunks],
            done=done,
            status=rpc.to_status(error) if error else None,
            peer_instance_id=peer,
            transferred_bytes=size_bytes,
            transfer_duration=Duration(nanos=int(seconds % 1 * 1e9), seconds=int(seconds)),
        )
        self.outbox.put(pb.AttachResponse(loaded=[loaded]))


def _key(raw: bytes, field: str) -> ChunkKey:
    if len(raw) != KEY_BYTES:
        raise BadChunkKey(f"{field} has {len(raw)} bytes, not {KEY_BYTES}", field=field)
    return ChunkKey(raw)
