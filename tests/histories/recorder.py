"""Records the calls of a fleet: of clients and relays at their channels, of engines where they send and receive.

Records are written as soon as they are complete, so that memory holds only calls that are open.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import grpc

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.pool.pool import Pool
from lmkv.v1 import cache_service_pb2 as cache_pb
from tests.chaos.engine import Engine
from tests.chaos.tap import ACTOR, Tap
from tests.histories import summaries
from tests.histories.history import NEVER, Outcome, Record, dump
from tests.histories.recorded_engine import RecordedEngine
from tests.histories.summaries import Summary
from tests.server.node.engine_client import EngineClient


class Call:
    """An open call, which is recorded once it is ended."""

    def __init__(self, recorder: Recorder, fields: dict[str, Any]) -> None:
        self._recorder = recorder
        self._fields = fields
        self.start: float = fields["start"]
        self.request: Summary = fields["request"]

    def end(self, answer: Summary, at: float | None = None) -> None:
        """It was answered, now or before."""
        self._write(Outcome.OK, self._recorder.now() if at is None else at, answer)

    def fail(self, code: str) -> None:
        """It ended with an error, after which it may have happened or not."""
        outcome = Outcome.UNKNOWN if code in summaries.MAY_HAVE_HAPPENED else Outcome.FAILED
        self._write(outcome, NEVER if outcome is Outcome.UNKNOWN else self._recorder.now(), {"error": code})

    def _write(self, outcome: Outcome, end: float, answer: Summary) -> None:
        self._recorder.calls.discard(self)
        if "timeout" in self.request:
            answer = answer | {"seconds": round(self._recorder.now() - self.start, 3)}
        self._recorder.write(Record(**self._fields, end=end, outcome=outcome, answer=answer))


class Recorder(Tap):
    """Writes the records of one run into a file. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        """Records written."""
        self.calls: set[Call] = set()
        """Open calls."""
        self.orders: dict[str, Call | None] = {}
        """Orders by id; None if the outcome was recorded."""
        self.watched: dict[tuple[str, str], float] = {}
        """When the last response of a watch arrived, by actor and coordinator."""
        self.map_ids: dict[tuple[str, str], str] = {}
        """The layout map that a coordinator shares, as last announced to a node; by both of them."""
        self._file = path.open("w")
        self._begin = time.monotonic()
        self._streams = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in list(self.calls):
            call.fail("UNKNOWN")
        self._file.close()

    def now(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self._begin, 6)

    def stream(self, name: str) -> str:
        return f"{name} {next(self._streams)}"

    def open(
        self, call: str, server: str, request: Summary, actor: str = "", stream: str = "", start: float | None = None
    ) -> Call:
        fields = {"call": call, "actor": actor or ACTOR.get(), "server": server, "stream": stream}
        opened = Call(self, fields | {"request": request, "start": self.now() if start is None else start})
        self.calls.add(opened)
        return opened

    def write(self, record: Record) -> None:
        """Writes one. What ends after the run is left out."""
        if not self._file.closed:
            self.count += 1
            self._file.write(dump(record) + "\n")

    @contextmanager
    def fault(self, kind: str, target: str) -> Iterator[None]:
        """Records a fault that lasts as long as the context."""
        start = self.now()
        try:
            yield
        finally:
            request = {"kind": kind}
            fault = Record(call="Fault", actor="havoc", server=target, start=start, end=self.now(), request=request)
            self.write(fault)

    # --- Tap ---------------------------------------------------------------------------------------------------------

    def client_channel(self, address: str, server: str) -> grpc.aio.Channel:
        """See `Tap`."""
        return self._channel(address, server, is_direct=True)

    def relay_channel(self, address: str, server: str) -> grpc.aio.Channel:
        """See `Tap`."""
        return self._channel(address, server, is_direct=False)

    def engine(self, client: EngineClient, pool: Pool, node: str) -> Engine:
        """See `Tap`."""
        return RecordedEngine(client, pool, self, node)

    def _channel(self, address: str, server: str, *, is_direct: bool) -> grpc.aio.Channel:
        unary: Any = Unary(self, server, is_direct=is_direct)
        channel = grpc.aio.insecure_channel(address, options=rpc.CHANNEL_OPTIONS, interceptors=[unary])
        return cast(grpc.aio.Channel, RecordedChannel(channel, self, server))


def method_of(details: Any) -> str:
    """`Service/Method` of a call."""
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    return str(method).rpartition(".")[2]


def parsed(kind: Any, message: Any) -> Any:
    """A message of a relay, which passes bytes on, or of a client."""
    return kind.FromString(message) if isinstance(message, bytes) else message


class Unary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Records unary calls. `is_direct` ones are a client's, whose deadlines no fault of a link excuses."""

    def __init__(self, recorder: Recorder, server: str, *, is_direct: bool) -> None:
        self._recorder = recorder
        self._server = server
        self._is_direct = is_direct

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """See `grpc.aio.UnaryUnaryClientInterceptor`."""
        name = method_of(client_call_details)
        method = summaries.METHODS.get(name)
        asked = method.request(parsed(method.request_type, request)) if method else {}
        if self._is_direct and client_call_details.timeout is not None:
            asked |= {"timeout": client_call_details.timeout}
        actor = "" if self._is_direct else asked.get("instance") or asked.get("excluded") or "a node"
        call = self._recorder.open(method.call if method else name, self._server, asked, actor)
        try:
            intercepted = await continuation(client_call_details, request)
            answer = await intercepted
        except grpc.aio.AioRpcError as error:
            call.fail(error.code().name)
            raise
        except asyncio.CancelledError:
            call.fail("CANCELLED")
            raise
        said = method.answer(parsed(method.answer_type, answer)) if method else {}
        call.end(said)
        if name == "RegistryService/Register":
            self._recorder.map_ids[self._server, asked["instance"]] = said["map"]
        if name == "Operations/ListOperations":
            for operation in answer.operations:
                listed = {"operation": operation.name}
                asked_for = self._recorder.open("GetOperation", self._server, listed, actor, start=call.start)
                asked_for.end(summaries.operation_answer(operation))
        return intercepted


class Stream:
    """A streaming call that shows its messages to functions: each before it is sent, and after it has arrived.

    gRPC's interceptors of streams do not clean up after streams that break.
    """

    def __init__(self, call: Any, sent: Callable[[Any], None], received: Callable[[Any], None]) -> None:
        self._call = call
        self._sent = sent
        self._received = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
            raise StopAsyncIteration
        return message

    async def write(self, message: Any) -> None:
        """Sends a message."""
        self._sent(message)
        await self._call.write(message)

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""
        message = await self._call.read()
        if message is not grpc.aio.EOF:  # type: ignore[attr-defined]
            self._received(message)
        return message


class RecordedChannel:
    """A channel to one process, whose calls are recorded."""

    def __init__(self, channel: Any, recorder: Recorder, server: str) -> None:
        self._channel = channel
        self._recorder = recorder
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def unary_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Stream]:
        """See `grpc.aio.Channel`: `Watch`."""
        begin = self._channel.unary_stream(method, *codecs, **options)
        return lambda request, **fields: Stream(begin(request, **fields), _ignore, self._watch(request.start_revision))

    def stream_stream(self, method: str, *codecs: Any, **options: Any) -> Callable[..., Stream]:
        """See `grpc.aio.Channel`: `LookupStream` and `Report`."""
        begin = self._channel.stream_stream(method, *codecs, **options)

        def call(**fields: Any) -> Stream:
            if method.endswith("/Report"):
                stream = ReportStream(self._recorder, self._server)
                return Stream(begin(**fields), stream.sent, stream.received)
            return Stream(begin(**fields), *self._lookups())

        return call

    def _watch(self, start_revision: int) -> Callable[[Any], None]:
        recorder, server, start = self._recorder, self._server, self._recorder.now()
        stream, actor, asked = recorder.stream("watch"), ACTOR.get(), {"start_revision": start_revision}

        def received(response: cache_pb.WatchResponse) -> None:
            nonlocal start
            call = recorder.open("Watch", server, asked, actor, stream, start)
            call.end(summaries.watch_answer(response))
            recorder.watched[actor, server] = start = recorder.now()

        return received

    def _lookups(self) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
        """The results of a `LookupStream` are in the order of the requests."""
        recorder, server, actor = self._recorder, self._server, ACTOR.get()
        stream, calls = recorder.stream("lookups"), deque[Call]()

        def sent(message: cache_pb.LookupStreamRequest) -> None:
            for request in message.requests:
                calls.append(recorder.open("LookupStream", server, summaries.lookup_request(request), actor, stream))

        def received(message: cache_pb.LookupStreamResponse) -> None:
            for result in message.results:
                if result.HasField("response"):
                    calls.popleft().end(summaries.lookup_answer(result.response))
                else:
                    calls.popleft().fail(rpc.from_status(result.error).code)

        return sent, received


def _ignore(message: Any) -> None:
    """A message that is recorded elsewhere."""


class ReportStream:
    """One report stream between a relay and its coordinator."""

    def __init__(self, recorder: Recorder, coordinator: str) -> None:
        self._recorder = recorder
        self._coordinator = coordinator
        self._name = recorder.stream("reports")
        self._node = ""
        self._open: deque[tuple[int, Call]] = deque()

    def sent(self, message: bytes) -> None:
        """A report arrived, which is passed on now."""
        report = report_pb.ReportRequest.FromString(message)
        self._node = report.instance_id
        map_id = self._recorder.map_ids.get((self._coordinator, self._node), "")
        asked = summaries.report_request(report, map_id)
        call = self._recorder.open("Report", self._coordinator, asked, self._node, self._name)
        self._open.append((report.sequence, call))
        for outcome in report.outcomes:
            order = self._recorder.orders.get(outcome.order_id)
            if order is not None:
                self._recorder.orders[outcome.order_id] = None
                order.end(summaries.outcome_answer(outcome, order.request["keys"]))

    def received(self, message: bytes) -> None:
        """The coordinator's response arrived, which is passed on now."""
        response = report_pb.ReportResponse.FromString(message)
        if sequence := response.acked_sequence:
            answer = {"acked_sequence": sequence, "revision": response.revision}
            self._recorder.open("Acknowledge", self._coordinator, {}, self._node, self._name).end(answer)
            late = deque((number, call) for number, call in self._open if number > sequence)
            for number, call in self._open:
                if number <= sequence:
                    call.end({"revision": response.revision})
            self._open = late
        for order in response.orders:
            if order.order_id not in self._recorder.orders and (summary := summaries.order_request(order)):
                name, asked = summary
                self._recorder.orders[order.order_id] = self._recorder.open(name, self._node, asked, self._coordinator)
