"""The services that clients call: CacheService (lookups, watches, moves, clears, drains, pins), and Operations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf import empty_pb2
from numpy.typing import NDArray

from lmkv import rpc
from lmkv.auth.caller import client_identity
from lmkv.errors import BadMessage
from lmkv.rpc.messages import OUTCOMES_BY_NUMBER, names_chunks
from lmkv.rpc.requests import page_limit, page_token, read_page_token
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import cache_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.drains import Drains
from lmkv_server.coordinator.operations.explanations import Explanations, FleetHints
from lmkv_server.coordinator.operations.moves import Moves
from lmkv_server.coordinator.operations.operations import Operations, to_proto
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.operations.pins import FleetPins
from lmkv_server.coordinator.operations.shared import SharedOperations
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.lookups import LookupAnswers, answers


class FleetOperations:
    """The operations of one tenant's fleet. Ended operations are kept for `operation_ttl` seconds."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders, *, operation_ttl: float) -> None:
        self.table = Operations(operation_ttl)
        self.moves = Moves(registry, selector, orders, self.table)
        self.clears = Clears(registry, selector, orders, self.table)
        self.drains = Drains(registry, orders, self.table)
        self.pins = FleetPins(registry, selector, orders)
        self.explanations = Explanations(registry, selector, orders)
        self.hints = FleetHints(registry, selector, orders)

    async def aclose(self) -> None:
        """Stops the operations that run here."""
        await self.table.aclose()


class CacheService(pb_grpc.CacheServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns what they use."""

    def __init__(
        self,
        selector: Selector,
        lookups: LookupAnswers,
        operations: FleetOperations,
        watch: LayoutWatch,
    ) -> None:
        self._selector = selector
        self._lookups = lookups
        self._operations = operations
        self._watch = watch

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, pb.LookupResponse())

    async def LookupStream(
        self, request_iterator: AsyncIterator[pb.LookupStreamRequest], context: Any
    ) -> AsyncIterator[pb.LookupStreamResponse]:
        async for answer in answers(request_iterator, self._lookup, pb.LookupStreamResponse, context):
            yield answer

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        return await self._operations.explanations.explain(request, client_identity(context))

    async def Move(self, request: pb.MoveRequest, context: Any) -> operations_pb2.Operation:
        with audited("copy" if request.copy else "move", request) as entry:
            operation = await self._operations.moves.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> operations_pb2.Operation:
        with audited("clear", request) as entry:
            operation = await self._operations.clears.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> operations_pb2.Operation:
        with audited("drain", request) as entry:
            operation = self._operations.drains.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        with audited("pin", request) as entry:
            pin = await self._operations.pins.pin(request)
            entry.names["pin"] = pin.pin_id
        return pb.PinResponse(pin=pin)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        with audited("unpin", request):
            await self._operations.pins.unpin(request.pin_id)
        return pb.UnpinResponse()

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        with audited("hint", request) as entry:
            response = await self._operations.hints.hint(request)
            entry.names["result"] = OUTCOMES_BY_NUMBER.get(response.result.outcome, "unknown")
        return response

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        last = read_page_token("ListPins", request.page_token)
        rest = [pin for pin in self._operations.pins.in_force(request.instance_id) if pin.pin_id > last]
        page = rest[: page_limit(request.page_size)]
        more = len(page) < len(rest)
        return pb.ListPinsResponse(pins=page, next_page_token=page_token("ListPins", page[-1].pin_id) if more else "")

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        async for response in self._watch.watch(request.start_revision, request.fingerprint, client_identity(context)):
            yield response

    async def lookup_tokens(
        self, tokens: NDArray[np.integer], *, model_name: str = "", cache_salt: str = "", lora_name: str = ""
    ) -> pb.LookupResponse:
        """Answers a lookup whose tokens are an array. Raises the errors of `Lookup`."""
        begin = time.perf_counter()
        selections = await self._selector.of_tokens(tokens, model_name, cache_salt, lora_name, held_only=True)
        response = pb.LookupResponse()
        await self._lookups.answer(begin, selections, response, is_probe=not tokens.size)
        return response

    async def _lookup(self, request: pb.LookupRequest, response: pb.LookupResponse) -> pb.LookupResponse:
        begin = time.perf_counter()
        selections = await self._selector.select(request.prompt, held_only=True)
        await self._lookups.answer(
            begin, selections, response, request.excluded_instance_id, is_probe=not names_chunks(request.prompt)
        )
        return response


DEFAULT_WAIT_SECONDS = 60.0
MAX_WAIT_SECONDS = 600.0
FILTERS = {"": (True, False), "done=true": (True,), "done=false": (False,)}
"""Filters of `ListOperations`, and the values of `done` that match each."""


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # has no stubs
    """Handlers of one tenant: they show the operations of all coordinators that share a map, and change their own."""

    def __init__(self, operations: Operations, shared: SharedOperations) -> None:
        self._operations = operations
        self._shared = shared

    async def GetOperation(self, request: operations_pb2.GetOperationRequest, context: Any) -> operations_pb2.Operation:
        return to_proto(await self._shared.get(request.name))

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, context: Any
    ) -> operations_pb2.ListOperationsResponse:
        """Newest first."""
        wanted = FILTERS.get(request.filter.replace(" ", ""))
        if wanted is None:
            raise BadMessage(f"filter {request.filter[:100]!r} is unknown; use done=true, done=false or none")
        last = read_page_token("ListOperations", request.page_token)
        rest = [
            operation
            for operation in await self._shared.newest_first()
            if operation.done in wanted and (not last or operation.start_key < last)
        ]
        response = operations_pb2.ListOperationsResponse()
        size_bytes = 0
        for operation in rest[: page_limit(request.page_size)]:
            listed = to_proto(operation)
            size_bytes += listed.ByteSize()
            if response.operations and size_bytes > rpc.MAX_MESSAGE_BYTES // 2:
                break
            response.operations.append(listed)
        if len(response.operations) < len(rest):
            last = rest[len(response.operations) - 1].start_key
            response.next_page_token = page_token("ListOperations", last)
        return response

    async def WaitOperation(
        self, request: operations_pb2.WaitOperationRequest, context: Any
    ) -> operations_pb2.Operation:
        """The operation once it has ended, or its state at the timeout or just before the caller's deadline."""
        seconds = DEFAULT_WAIT_SECONDS
        if request.HasField("timeout"):
            seconds = min(max(request.timeout.ToNanoseconds() / 1e9, 0.0), MAX_WAIT_SECONDS)
        left = context.time_remaining()
        if left is not None:
            seconds = min(seconds, max(0.9 * left, 0.0))
        return to_proto(await self._shared.wait(request.name, seconds))

    async def CancelOperation(self, request: operations_pb2.CancelOperationRequest, context: Any) -> empty_pb2.Empty:
        with audited("cancel", request):
            (await self._shared.get_own(request.name)).cancelled.set()
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: operations_pb2.DeleteOperationRequest, context: Any) -> empty_pb2.Empty:
        with audited("delete", request):
            self._operations.delete((await self._shared.get_own(request.name)).name)
        return empty_pb2.Empty()
