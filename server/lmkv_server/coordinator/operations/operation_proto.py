"""Operations as messages: for clients, and as the records that nodes store."""

from __future__ import annotations

import time
from collections.abc import Mapping

from google.longrunning import operations_pb2
from google.protobuf.message import DecodeError, Message

from lmkv import rpc
from lmkv.errors import BadMessage
from lmkv.rpc.requests import check_times
from lmkv.v1 import cache_service_pb2, registry_service_pb2
from lmkv_server.coordinator.operations.operation import OPERATION_BYTES, End, Operation, Progress

MAX_RECORD_BYTES = rpc.MAX_MESSAGE_BYTES - 4096
"""A longer record omits the request: then every coordinator can answer for it, but none can take it over."""
MAX_READ_HOLDERS = 16
"""Most holders of a record that a coordinator reads; it chooses fewer itself."""

_MESSAGES: Mapping[str, tuple[type[Progress], type[Message]]] = {
    "move": (cache_service_pb2.MoveProgress, cache_service_pb2.MoveResult),
    "copy": (cache_service_pb2.MoveProgress, cache_service_pb2.MoveResult),
    "clear": (cache_service_pb2.ClearProgress, cache_service_pb2.ClearResult),
    "drain": (cache_service_pb2.DrainProgress, cache_service_pb2.DrainResult),
}
"""Messages of progress and result by kind of operation."""


def to_proto(operation: Operation) -> operations_pb2.Operation:
    """The operation for clients, in its current state."""
    message = operations_pb2.Operation(name=operation.name, done=operation.done)
    message.metadata.Pack(operation.progress)
    if operation.error:
        message.error.CopyFrom(rpc.to_status(operation.error))
    elif operation.result:
        message.response.Pack(operation.result)
    return message


def to_record(operation: Operation, ttl_seconds: float) -> registry_service_pb2.OperationRecord:
    """The record that nodes store until `ttl_seconds` after its end."""
    record = registry_service_pb2.OperationRecord(
        operation=to_proto(operation),
        attempt=operation.attempt,
        coordinator_id=operation.coordinator_id,
        cancelled=operation.cancelled.is_set(),
    )
    for instance_id, epoch in operation.holders.items():
        record.holders.add(instance_id=instance_id, epoch=epoch)
    if operation.proposal and not operation.done:
        record.proposed_end.attempt, record.proposed_end.coordinator_id = operation.attempt, operation.coordinator_id
        record.proposed_end.operation.CopyFrom(_ended(operation.name, operation.proposal))
    match operation.request:
        case cache_service_pb2.MoveRequest():
            record.move.CopyFrom(operation.request)
        case cache_service_pb2.ClearRequest():
            record.clear.CopyFrom(operation.request)
        case cache_service_pb2.DrainRequest():
            record.drain.CopyFrom(operation.request)
    expire_time = operation.end_time + ttl_seconds if operation.end_time else operation.expire_time
    record.expire_time.FromNanoseconds(round(expire_time * 1e9))
    if record.ByteSize() > MAX_RECORD_BYTES and (request := record.WhichOneof("request")):
        record.ClearField(request)
    return record


def _ended(name: str, end: End) -> operations_pb2.Operation:
    message = operations_pb2.Operation(name=name, done=True)
    message.metadata.Pack(end.progress)
    if end.error:
        message.error.CopyFrom(rpc.to_status(end.error))
    elif end.result:
        message.response.Pack(end.result)
    return message


def from_proposal(proposed: registry_service_pb2.ProposedEnd) -> End:
    """The end that an attempt proposed. Raises `BadMessage`."""
    message = proposed.operation
    progress, result = _unpacked(message)
    return End(
        progress=progress,
        result=result if message.HasField("response") else None,
        error=rpc.from_status(message.error) if message.HasField("error") else None,
    )


def _unpacked(message: operations_pb2.Operation) -> tuple[Progress, Message]:
    """Progress and result. Raises `BadMessage` if they are of another kind of operation than the name, or invalid.

    gRPC's decoding does not look into an `Any`: what is in it would fail only when the operation is shown.
    """
    shown = message.name[:100]
    if (kinds := _MESSAGES.get(message.name.partition("-")[0])) is None:
        raise BadMessage(f"the record of {shown!r} is of an unknown kind of operation", name=shown)
    progress, result = kinds[0](), kinds[1]()
    try:
        is_known = message.metadata.Unpack(progress) and (
            not message.HasField("response") or message.response.Unpack(result)
        )
    except DecodeError:
        is_known = False
    if not is_known:
        raise BadMessage(f"the record of {shown!r} is of another kind than its name", name=shown)
    check_times(progress)
    check_times(result)
    return progress, result


def from_record(record: registry_service_pb2.OperationRecord, longest_seconds: float) -> Operation:
    """The operation of a record; its deadline is at most `longest_seconds` away. Raises `BadMessage`."""
    if len(record.holders) > MAX_READ_HOLDERS:
        raise BadMessage(f"the record has {len(record.holders)} holders; at most {MAX_READ_HOLDERS} are allowed")
    message, now = record.operation, time.time()
    progress, result = _unpacked(message)
    request = record.WhichOneof("request")
    holders = {holder.instance_id: holder.epoch for holder in record.holders}
    operation = Operation(
        name=message.name,
        kind=message.name.partition("-")[0],
        progress=progress,
        request=getattr(record, request) if request else None,
        create_time=progress.create_time.ToNanoseconds() / 1e9,
        expire_time=min(record.expire_time.ToNanoseconds() / 1e9, now + longest_seconds),
        attempt=record.attempt,
        coordinator_id=record.coordinator_id,
        holders=holders,
        record_holders=set(holders),
    )
    operation.size_bytes = OPERATION_BYTES + record.ByteSize()
    if record.cancelled:
        operation.cancelled.set()
    if message.done:
        operation.end_time = min(progress.end_time.ToNanoseconds() / 1e9, now)
        operation.error = rpc.from_status(message.error) if message.HasField("error") else None
        operation.result = result if message.HasField("response") else None
    return operation
