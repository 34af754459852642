"""The loads of one engine's stream: bring chunks of a looked-up prompt into the pool. Used by `EngineStream`."""

from __future__ import annotations

import asyncio

from google.protobuf.duration_pb2 import Duration

from lmkv import rpc, telemetry
from lmkv.errors import BadMessage, ChunkNotFound, LmkvError
from lmkv.telemetry import Span
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.engines.lookups import EngineLookups
from lmkv_server.node.engines.outbox import Outbox
from lmkv_server.node.engines.request_tasks import RequestTasks
from lmkv_server.node.sessions.extents import MAX_EXTENTS, add_held
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.stack import TierStack


class EngineLoads:
    """Reports chunks as they arrive, then the end of each load. A release cancels it."""

    def __init__(
        self, session: EngineSession, stack: TierStack, lookups: EngineLookups, outbox: Outbox, tasks: RequestTasks
    ) -> None:
        self._session = session
        self._stack = stack
        self._lookups = lookups
        self._outbox = outbox
        self._tasks = tasks

    def load(self, load: pb.LoadChunks) -> None:
        """Begins a load. Failures are reported in its last answer."""
        self._tasks.start(load.lookup_id, self._load(load))

    async def _load(self, load: pb.LoadChunks) -> None:
        with telemetry.follow("lmkv.fetch", load.traceparent, asked_chunks=load.chunk_count) as span:
            await self._fetch(load, span)

    async def _fetch(self, load: pb.LoadChunks, span: Span) -> None:
        lease = self._session.lease(load.lookup_id)
        found = self._lookups.found(load.lookup_id)
        if lease is None or found is None or load.first_chunk < lease.own_count:
            refusal = BadMessage("the load names no chunks that a lookup found outside the pool")
            span.fail(refusal.reason, str(refusal))
            self._end(load, error=refusal)
            return
        arrived_count = 0

        def on_chunks(chunks: list[tuple[int, Chunk]]) -> None:
            nonlocal arrived_count
            arrived_count += len(chunks)
            arrived = [chunk for _, chunk in chunks]
            if self._session.hold(load.lookup_id, arrived):
                self._report(load, chunks[0][0], arrived)

        try:
            fetched = await self._stack.load(
                found,
                range(load.first_chunk, load.first_chunk + load.chunk_count),
                load.timeout.ToNanoseconds() / 1e9,
                on_chunks,
                lease.handoff_id,
            )
        except asyncio.CancelledError:
            if arrived_count < load.chunk_count:
                raise
            span.set(arrived_chunks=arrived_count)  # the engine had all of it, and has released it
            return
        error = fetched.error
        if error is None and fetched.chunk_count < load.chunk_count:
            error = ChunkNotFound("chunks are no longer available")
        span.set(
            arrived_chunks=fetched.chunk_count,
            transferred_bytes=fetched.size_bytes,
            peer_instance_ids=fetched.instance_ids,
        )
        if error:
            span.fail(error.reason, str(error))
        self._end(
            load,
            error=error,
            peer_id=",".join(fetched.instance_ids),
            size_bytes=fetched.size_bytes,
            seconds=fetched.seconds,
        )

    def _report(self, load: pb.LoadChunks, first_chunk: int, chunks: list[Chunk]) -> None:
        """Reports consecutive chunks, in as many messages as they need."""
        for start in range(0, len(chunks), MAX_EXTENTS):
            loaded = pb.LoadedChunks(lookup_id=load.lookup_id, first_chunk=first_chunk + start)
            add_held(loaded.chunks, chunks[start : start + MAX_EXTENTS])
            self._outbox.put(pb.Event(loaded=loaded))

    def _end(
        self,
        load: pb.LoadChunks,
        *,
        error: LmkvError | None = None,
        peer_id: str = "",
        size_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Reports the end of a load."""
        loaded = pb.LoadedChunks(
            lookup_id=load.lookup_id,
            done=True,
            status=rpc.to_status(error) if error else None,
            peer_instance_id=peer_id,
            transferred_bytes=size_bytes,
            transfer_duration=Duration(nanos=int(seconds % 1 * 1e9), seconds=int(seconds)),
        )
        self._outbox.put(pb.Event(loaded=loaded))
