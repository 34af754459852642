"""google.longrunning.Operations: will say how far moves and clears are; in this version there are none."""

from __future__ import annotations

from google.longrunning import operations_pb2_grpc

from lmkv_server.coordinator.unimplemented import unimplemented


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # has no stubs
    """The handlers."""

    ListOperations = unimplemented("ListOperations")
    GetOperation = unimplemented("GetOperation")
    DeleteOperation = unimplemented("DeleteOperation")
    CancelOperation = unimplemented("CancelOperation")
    WaitOperation = unimplemented("WaitOperation")
