"""A coordinator by script that shares its layout map with others, or keeps its own. Over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc

from lmkv import rpc
from lmkv.errors import BadMessage, Full, ResyncRequired
from lmkv.internal import PROTOCOL_VERSION
from lmkv.internal.v1 import lookup_service_pb2, lookup_service_pb2_grpc, report_service_pb2_grpc
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import ChunkKey, split_keys
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc


class Sharing(registry_service_pb2_grpc.RegistryServiceServicer, report_service_pb2_grpc.ReportServiceServicer):
    """Records what one instance reports, by the rules of the protos. An async context manager."""

    def __init__(self, map_id: str = "", *, lease_seconds: float = 2.0) -> None:
        self.map_id = map_id
        """What `Register` is answered."""
        self.lease_seconds = lease_seconds
        self.put_off_seconds = 0.0
        """If set, `Register` is refused, and says to come back after so long."""
        self.turns_off = False
        """Whether it shares no more once it has answered the next `Register`."""
        self.refuses_elsewhere = False
        """Whether it refuses what it said it would take."""
        self.breaks_streams = False
        """Whether every stream ends with its first report."""
        self.acking = True
        """Whether reports are acknowledged."""
        self.held: set[ChunkKey] = set()
        """The chunks of the newest stream that reports chunks, over all tiers."""
        self.reports_chunks: bool | None = None
        """Whether chunks come over the stream that is open; None if there is none, or no snapshot yet."""
        self.report_counts: Counter[ChunkKey] = Counter()
        """The number of times that each chunk was reported as held."""
        self.counts: Counter[str] = Counter()
        """How often each thing came: `register`, `stream`, `snapshot`, `elsewhere`, `digest`, `usage`, `refused`,
        `bad`, `lookup`, `farewell`."""
        self.register_times: list[float] = []
        """When each `Register` came, on the monotonic clock."""
        self._resyncing: set[asyncio.Event] = set()
        self._server: grpc.aio.Server | None = None
        self._port = 0

    ListInstances: Any = None
    LocateInstance: Any = None

    # --- Life ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serves at the same port as before, and knows nothing."""
        self.held.clear()
        self._server = await rpc.make_server(["lmkv.v1.RegistryService"])
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(self, self._server)
        report_service_pb2_grpc.add_ReportServiceServicer_to_server(self, self._server)
        lookup_service_pb2_grpc.add_LookupServiceServicer_to_server(_Lookups(self), self._server)
        self._port = rpc.add_port(self._server, f"127.0.0.1:{self._port}")
        await self._server.start()

    async def stop(self) -> None:
        """Ends as one that is killed: every connection breaks."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def share(self, map_id: str) -> None:
        """Turns sharing on or off: streams restart."""
        self.map_id = map_id
        self.resync()

    def resync(self) -> None:
        """Asks for a new stream."""
        for event in self._resyncing:
            event.set()

    # --- Services ------------------------------------------------------------------------------------------------

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:  # noqa: N802
        self.counts["register"] += 1
        self.register_times.append(time.monotonic())
        if self.put_off_seconds:
            raise Full("others are first", retry_seconds=self.put_off_seconds)
        response = pb.RegisterResponse(
            instance=request.instance, layout_map_id=self.map_id, protocol_version=PROTOCOL_VERSION
        )
        response.lease_ttl.FromMilliseconds(round(1e3 * self.lease_seconds))
        if self.turns_off:
            self.turns_off, self.map_id = False, ""
        return response

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:  # noqa: N802
        self.counts["farewell"] += 1
        return pb.DeregisterResponse()

    async def Report(  # noqa: N802
        self, request_iterator: AsyncIterator[report_pb.ReportRequest], context: Any
    ) -> AsyncIterator[report_pb.ReportResponse]:
        stream = _Stream(self)
        resyncing = asyncio.Event()
        self._resyncing.add(resyncing)
        self.counts["stream"] += 1
        asked = asyncio.ensure_future(resyncing.wait())
        reading: asyncio.Future[report_pb.ReportRequest | None] | None = None
        try:
            while True:
                reading = asyncio.ensure_future(anext(request_iterator, None))
                await asyncio.wait((reading, asked), return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    raise ResyncRequired("whether the layout map is shared has changed")
                if (report := reading.result()) is None:
                    return
                if self.breaks_streams:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
                stream.apply(report)
                if self.acking:
                    yield report_pb.ReportResponse(acked_sequence=report.sequence)
        finally:
            asked.cancel()
            if reading is not None:
                reading.cancel()
            self._resyncing.discard(resyncing)
            stream.close()


class _Lookups(lookup_service_pb2_grpc.LookupServiceServicer):
    """Finds nothing."""

    def __init__(self, coordinator: Sharing) -> None:
        self._coordinator = coordinator

    async def Lookup(  # noqa: N802
        self, request: lookup_service_pb2.LookupRequest, context: Any
    ) -> lookup_service_pb2.LookupResponse:
        self._coordinator.counts["lookup"] += 1
        return lookup_service_pb2.LookupResponse(is_complete=True)

    async def LookupStream(  # noqa: N802
        self, request_iterator: AsyncIterator[lookup_service_pb2.LookupStreamRequest], context: Any
    ) -> AsyncIterator[lookup_service_pb2.LookupStreamResponse]:
        async for message in request_iterator:
            answer = lookup_service_pb2.LookupStreamResponse()
            for request in message.requests:
                answer.results.add().response.CopyFrom(await self.Lookup(request, context))
            yield answer


class _Stream:
    """One stream of reports."""

    def __init__(self, coordinator: Sharing) -> None:
        self._coordinator = coordinator
        self._sequence = 0
        self._staged: set[ChunkKey] = set()
        self._reported_elsewhere = False
        self._is_synced = False

    def apply(self, report: report_pb.ReportRequest) -> None:
        """Raises what a coordinator would."""
        here = self._coordinator
        self._sequence += 1
        assert report.sequence == self._sequence
        if report.reported_elsewhere:
            assert report.sequence == 1
            if not here.map_id or here.refuses_elsewhere:
                here.counts["refused"] += 1
                raise ResyncRequired("this coordinator keeps its own layout map")
            here.counts["elsewhere"] += 1
            self._reported_elsewhere = True
            here.reports_chunks = False
        here.counts["usage"] += bool(report.tiers)
        if self._reported_elsewhere:
            if report.changes or report.snapshot or report.snapshot_end or report.digests:
                here.counts["bad"] += 1
                raise BadMessage("chunks are reported elsewhere")
            return
        here.counts["digest"] += len(report.digests)
        for change in report.changes:
            admitted = split_keys(change.admitted_keys)
            here.report_counts.update(admitted)
            held = here.held if self._is_synced else self._staged
            held |= set(admitted)
            held -= set(split_keys(change.evicted_keys))
        if report.snapshot_end:
            here.held, self._is_synced, here.reports_chunks = self._staged, True, True
            here.counts["snapshot"] += 1

    def close(self) -> None:
        """It has ended, and its reports are no longer valid."""
        if self._is_synced:
            self._coordinator.held = set()
        if self._is_synced or self._reported_elsewhere:
            self._coordinator.reports_chunks = None
