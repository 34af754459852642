"""Operations as messages for clients."""

from __future__ import annotations

from google.longrunning import operations_pb2

from lmkv import rpc
from lmkv_server.coordinator.operations.operation import Operation


def to_proto(operation: Operation) -> operations_pb2.Operation:
    """The operation for clients, in its current state."""
    message = operations_pb2.Operation(name=operation.name, done=operation.done)
    message.metadata.Pack(operation.progress)
    if operation.error:
        message.error.CopyFrom(rpc.to_status(operation.error))
    elif operation.result:
        message.response.Pack(operation.result)
    return message
