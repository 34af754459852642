"""Relays of gRPC calls: where addresses are replaced by those of links, and reports are repeated and reordered.

    node ──link──► relay ──► coordinator          node ──link──► relay ──► node

A link knows bytes only; a relay is behind it, and never in trouble itself.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import grpc

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.internal.v1.lookup_service_pb2 import (
    LookupRequest,
    LookupResponse,
    LookupStreamRequest,
    LookupStreamResponse,
)
from lmkv.transfer.channel import unwrap, wrap
from lmkv.v1 import peer_service_pb2 as peer_pb
from lmkv.v1 import registry_service_pb2 as registry_pb
from tests.chaos.schedule import Kind

REGISTER = "/lmkv.v1.RegistryService/Register"
REPORT = "/lmkv.internal.v1.ReportService/Report"
LOOKUP = "/lmkv.internal.v1.LookupService/Lookup"
LOOKUP_STREAM = "/lmkv.internal.v1.LookupService/LookupStream"
INIT = "/lmkv.v1.PeerService/Init"

AddressOf = Callable[[str, str], str]
"""Where one node, by its name, reaches another one."""


class Relay(grpc.GenericRpcHandler, ABC):  # type: ignore[type-arg]  # not generic at run time
    """Passes all calls on to a server, and closes the channel to it. A context manager that serves at a port."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel` leads to the server."""
        self.port = 0
        """Where it serves, once it is entered."""
        self._channel: Any = channel
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)

    async def __aenter__(self) -> Self:
        self._server.add_generic_rpc_handlers((self,))
        self.port = rpc.add_port(self._server, "127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, details: Any) -> Any:
        """See `grpc.GenericRpcHandler`: messages stay bytes."""
        return grpc.unary_unary_rpc_method_handler(partial(self._pass_on, details.method))

    async def _pass_on(self, method: str, request: bytes, context: Any) -> bytes:
        try:
            answer = await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        return self._answer(method, request, answer)

    @abstractmethod
    def _answer(self, method: str, request: bytes, answer: bytes) -> bytes:
        """The answer for the caller."""


class PeerRelay(Relay):
    """In front of one node: announces its links to peers, so that transfers pass them, too."""

    def __init__(self, channel: grpc.aio.Channel, bytes_address: Callable[[str], str]) -> None:
        """`bytes_address` is where a peer, by its name, reaches the node's port for bytes over TCP."""
        super().__init__(channel)
        self._bytes_address = bytes_address

    def _answer(self, method: str, request: bytes, answer: bytes) -> bytes:
        if method != INIT:
            return answer
        asked, said = peer_pb.InitRequest.FromString(request), peer_pb.InitResponse.FromString(answer)
        if said.channel == "tcp":
            owner = f"{asked.peer_instance_id}:{asked.peer_epoch}"
            region, payload = unwrap(said.channel, owner, said.channel_metadata)
            host, _, port = self._bytes_address(asked.instance_id).rpartition(":")
            words = json.loads(payload) | {"host": host, "port": int(port)}
            end = cast(Any, SimpleNamespace(name=owner, pool=region))
            said.channel_metadata = wrap(said.channel, end, json.dumps(words).encode())
        return said.SerializeToString()


class CoordinatorRelay(Relay):
    """In front of one coordinator: announces links to nodes, and injects faults into reports."""

    def __init__(self, channel: grpc.aio.Channel, address_of: AddressOf) -> None:
        super().__init__(channel)
        self.map_ids: dict[str, str] = {}
        """The layout map that the coordinator shares, as last announced to each node; empty for its own."""
        self._address_of = address_of
        self._mischief: Counter[tuple[str, Kind]] = Counter()
        self._streams: dict[Any, tuple[str, bool]] = {}
        """Open streams, by their call: the node, and whether it reports its chunks."""

    def service(self, details: Any) -> Any:
        """See `Relay`."""
        if details.method == REPORT:
            return grpc.stream_stream_rpc_method_handler(self._report)
        if details.method == LOOKUP_STREAM:
            return grpc.stream_stream_rpc_method_handler(self._look_up)
        return super().service(details)

    def begin(self, node: str, kind: Kind) -> None:
        """Repeats or reorders the node's reports from now on."""
        self._mischief[node, kind] += 1

    def end(self, node: str, kind: Kind) -> None:
        """Takes a `begin` back."""
        self._mischief[node, kind] -= 1

    def reports_chunks(self, node: str) -> list[bool]:
        """Whether a node reports its chunks, for each of its open report streams."""
        return [reports for of, reports in self._streams.values() if of == node]

    def _answer(self, method: str, request: bytes, answer: bytes) -> bytes:
        if method == REGISTER:
            said = registry_pb.RegisterResponse.FromString(answer)
            self.map_ids[said.instance.instance_id] = said.layout_map_id
        if method != LOOKUP:
            return answer
        node, found = LookupRequest.FromString(request).excluded_instance_id, LookupResponse.FromString(answer)
        for holder in found.holders:
            holder.peer_address = self._address_of(node, holder.instance_id)
        return found.SerializeToString()

    async def _look_up(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Passes each lookup of a node on as a call of its own, whose failure ends the stream."""
        async for message in messages:
            answer = LookupStreamResponse()
            for one in LookupStreamRequest.FromString(message).requests:
                request = one.SerializeToString()
                try:
                    said = await self._channel.unary_unary(LOOKUP)(request)
                except grpc.aio.AioRpcError as error:
                    await _abort(context, error)
                answer.results.add().response.ParseFromString(self._answer(LOOKUP, request, said))
            yield answer.SerializeToString()

    async def _report(self, reports: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call = self._channel.stream_stream(REPORT)()
        context.add_done_callback(lambda _: call.cancel())  # also where this is not continued any more
        first = await anext(reports, None)
        if first is None:
            return
        opening = report_pb.ReportRequest.FromString(first)
        node = opening.instance_id
        self._streams[call] = node, not opening.reported_elsewhere
        context.add_done_callback(lambda _: self._streams.pop(call, None))
        sending = asyncio.create_task(self._send(node, first, reports, call))
        try:
            async for answer in call:
                for _ in range(2 if self._mischief[node, Kind.REPEAT] else 1):
                    yield self._ordered(node, answer)
        except grpc.aio.AioRpcError as error:
            await _abort(context, error)
        finally:
            self._streams.pop(call, None)
            sending.cancel()
            call.cancel()

    def _ordered(self, node: str, answer: bytes) -> bytes:
        """The answer, with the link's address in orders to fetch."""
        said = report_pb.ReportResponse.FromString(answer)
        for order in said.orders:
            if order.HasField("fetch"):
                order.fetch.peer_address = self._address_of(node, order.fetch.instance_id)
        return said.SerializeToString()

    async def _send(self, node: str, report: bytes | None, reports: AsyncIterator[bytes], call: Any) -> None:
        held: bytes | None = None
        try:
            while report is not None:
                if held is None and self._mischief[node, Kind.REORDER]:
                    held = report
                else:
                    for one in (report, held) if held is not None else (report,):
                        for _ in range(2 if self._mischief[node, Kind.REPEAT] else 1):
                            await call.write(one)
                    held = None
                report = await anext(reports, None)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):  # the call is over, as who reads its answers sees
            pass


async def _abort(context: Any, error: grpc.aio.AioRpcError) -> None:
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
