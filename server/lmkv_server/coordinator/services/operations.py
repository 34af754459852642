"""google.longrunning.Operations: state of moves, copies, clears and drains."""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2 as pb
from google.longrunning import operations_pb2_grpc as pb_grpc
from google.protobuf import empty_pb2

from lmkv import rpc
from lmkv.errors import BadMessage
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.operation import to_proto
from lmkv_server.coordinator.operations.operations import Operations
from lmkv_server.coordinator.operations.shared import SharedOperations
from lmkv_server.coordinator.services.pages import page_limit, page_token, read_page_token

DEFAULT_WAIT_SECONDS = 60.0
MAX_WAIT_SECONDS = 600.0
FILTERS = {"": (True, False), "done=true": (True,), "done=false": (False,)}
"""Filters of `ListOperations`, and the values of `done` that match each."""


class OperationsService(pb_grpc.OperationsServicer):  # type: ignore[misc]  # has no stubs
    """Handlers of one tenant: they show the operations of all coordinators that share a map, and change their own."""

    def __init__(self, operations: Operations, shared: SharedOperations) -> None:
        self._operations = operations
        self._shared = shared

    async def GetOperation(self, request: pb.GetOperationRequest, context: Any) -> pb.Operation:
        return to_proto(await self._shared.get(request.name))

    async def ListOperations(self, request: pb.ListOperationsRequest, context: Any) -> pb.ListOperationsResponse:
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
        response = pb.ListOperationsResponse()
        for operation in rest[: page_limit(request.page_size)]:
            response.operations.append(to_proto(operation))
            if response.ByteSize() > rpc.MAX_MESSAGE_BYTES // 2 and len(response.operations) > 1:
                response.operations.pop()
                break
        if len(response.operations) < len(rest):
            last = rest[len(response.operations) - 1].start_key
            response.next_page_token = page_token("ListOperations", last)
        return response

    async def WaitOperation(self, request: pb.WaitOperationRequest, context: Any) -> pb.Operation:
        """The operation once it has ended, or its state at the timeout or just before the caller's deadline."""
        seconds = DEFAULT_WAIT_SECONDS
        if request.HasField("timeout"):
            seconds = min(max(request.timeout.ToNanoseconds() / 1e9, 0.0), MAX_WAIT_SECONDS)
        left = context.time_remaining()
        if left is not None:
            seconds = min(seconds, max(0.9 * left, 0.0))
        return to_proto(await self._shared.wait(request.name, seconds))

    async def CancelOperation(self, request: pb.CancelOperationRequest, context: Any) -> empty_pb2.Empty:
        with audited("cancel", request):
            (await self._shared.get_own(request.name)).cancelled.set()
        return empty_pb2.Empty()

    async def DeleteOperation(self, request: pb.DeleteOperationRequest, context: Any) -> empty_pb2.Empty:
        with audited("delete", request):
            self._operations.delete((await self._shared.get_own(request.name)).name)
        return empty_pb2.Empty()
