"""Operations of the other coordinators that share a layout map: read only, so that each coordinator shows all of them.

    coordinator that runs it ──write──► shared map ──read──► any coordinator: get, list, wait

Nothing acts on a record: it can neither end an operation nor start one. Its MAC is made with `cluster_secret`, which
nodes and the store do not know, and what is read is rebuilt from messages of known types. An operation whose
coordinator does not renew its records is lost: its caller repeats the request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from lmkv import rpc
from lmkv.errors import BadMessage, LmkvError, OperationNotFound
from lmkv.packing import pack_fields
from lmkv.rpc.error_status import from_status
from lmkv.rpc.requests import check_times
from lmkv.telemetry.logs import LimitedLogger
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, OwnedRecords
from lmkv_server.coordinator.operations.operations import Operation, Operations, Progress

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

WRITE_SECONDS = 1.0
"""Interval at which the records of running operations are renewed."""
LOST_SECONDS = 10.0
"""An operation is lost if its records were not renewed for this time."""
POLL_SECONDS = 0.5
"""Interval at which a call that waits for another coordinator's operation reads its record: stores have no watch."""
MAX_RECORD_BYTES = 64 << 10
"""Larger records are written without the failures of the operation."""
MAX_RECORDS = 1000
"""Records of one tenant that a coordinator writes; the oldest ended operations are left out."""
MAX_WRITE_BYTES = 4 << 20
"""Records that one call writes; the rest follows after `WRITE_SECONDS`."""
MAX_READ_BYTES = 8 << 20
"""Records of one tenant that a coordinator reads at a time, newest coordinators first."""

_NAME = re.compile(r"(move|copy|clear|drain)-[0-9a-f]{16}")
_MOVE = (pb.MoveProgress, pb.MoveResult)
_MESSAGES: dict[str, tuple[type[Progress], type[Message]]] = {
    "move": _MOVE,
    "copy": _MOVE,
    "clear": (pb.ClearProgress, pb.ClearResult),
    "drain": (pb.DrainProgress, pb.DrainResult),
}


class _Record(msgspec.Struct, array_like=True, frozen=True):
    progress: bytes
    result: bytes | None
    error: bytes | None


class RecordSeal:
    """Encodes the records of one tenant, each with a MAC that only coordinators can make."""

    def __init__(self, cluster_secret: bytes, tenant: str) -> None:
        self._key = hmac.digest(cluster_secret, b"lmkv operation record v1", "sha256")
        self._tenant = tenant.encode()

    def encode(self, owner: str, operation: Operation) -> bytes:
        """The record of an operation that `owner` runs."""
        record = _Record(
            operation.progress.SerializeToString(),
            None if operation.result is None else operation.result.SerializeToString(),
            rpc.to_status(operation.error).SerializeToString() if operation.error else None,
        )
        body = msgspec.msgpack.encode(record)
        if len(body) > MAX_RECORD_BYTES and operation.result is not None:
            result = type(operation.result)()
            result.CopyFrom(operation.result)
            result.ClearField("failures")
            body = msgspec.msgpack.encode(_Record(record.progress, result.SerializeToString(), record.error))
        return self._mac(owner, operation.name, body) + body

    def decode(self, owner: str, name: str, data: bytes) -> Operation:
        """The inverse of `encode`, as another coordinator shows the operation. Raises `ValueError` or `LmkvError`."""
        mac, body = data[:32], data[32:]
        if not hmac.compare_digest(mac, self._mac(owner, name, body)):
            raise ValueError("it was made with another cluster_secret, or changed since")
        if not _NAME.fullmatch(name):
            raise ValueError("its name is not that of an operation")
        kind, _, start = name.partition("-")
        record = msgspec.msgpack.decode(body, type=_Record)
        new_progress, new_result = _MESSAGES[kind]
        progress = _parsed(new_progress(), record.progress)
        progress.coordinator = label(owner)
        result = None if record.result is None else _parsed(new_result(), record.result)
        error = None if record.error is None else from_status(_parsed(status_pb2.Status(), record.error))
        create_time = int(start, 16) / 1e9
        operation = Operation(
            name=name, kind=kind, progress=progress, request=None, create_time=create_time, expire_time=create_time
        )
        if result is not None or error is not None:
            operation.result, operation.error = result, error
            operation.end_time = progress.end_time.ToNanoseconds() / 1e9
        return operation

    def _mac(self, owner: str, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, pack_fields([self._tenant, owner.encode(), name.encode(), body]), "sha256")


def label(owner: str) -> str:
    """`HOST:PORT` of a coordinator, from the name under which it writes."""
    return owner.partition("#")[0]


def _parsed(message: M, data: bytes) -> M:
    """Fills a message, and rebuilds the statuses in it. Raises `BadMessage` if it could not be shown."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise BadMessage("it cannot be decoded") from None
    message.DiscardUnknownFields()
    check_times(message)
    for status in _statuses(message):
        status.CopyFrom(rpc.to_status(from_status(status)))
    return message


def _statuses(message: Message) -> Iterator[status_pb2.Status]:
    """All `google.rpc.Status` in a message: their details may have types that no JSON can show."""
    if isinstance(message, status_pb2.Status):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                yield from _statuses(part)


class SharedOperations:
    """Writes the operations of one tenant that run here into the shared map, and reads those of other coordinators."""

    def __init__(self, own: Operations, store: LayoutStore, seal: RecordSeal) -> None:
        self._own = own
        self._store = store
        self._seal = seal
        self._log = LimitedLogger(logger)
        self._map_id = ""
        """The map that has `_written`."""
        self._written: dict[str, bool] = {}
        """The operations whose records are in the map, and whether those are final."""
        # A coordinator without a shared map has no name in one, and writes nothing.
        self._task = asyncio.create_task(self._run(), name="lmkv-shared-operations") if store.owner else None

    async def get(self, name: str) -> Operation:
        """The operation of this name, here or at another coordinator. Raises `OperationNotFound`."""
        if known := self._own.find(name):
            return known
        operations = await self._read(name) if _NAME.fullmatch(name) else []
        if not operations:
            return self._own.get(name)  # raises
        if isinstance(operations[0].error, OperationNotFound):
            raise operations[0].error
        return operations[0]

    async def newest_first(self) -> list[Operation]:
        """The operations of all coordinators, by start time. Lost operations have ended with `OperationNotFound`."""
        own = self._own.newest_first()
        names = {operation.name for operation in own}
        others = [operation for operation in await self._read() if operation.name not in names]
        return sorted([*own, *others], key=lambda operation: operation.start_key, reverse=True)

    async def wait(self, name: str, timeout_seconds: float) -> Operation:
        """Waits until an operation has ended, at most for the timeout. Raises as `get`."""
        end = asyncio.get_running_loop().time() + timeout_seconds
        operation = await self.get(name)
        if operation.request is not None:
            await operation.wait(timeout_seconds)
            return operation
        while not operation.done and (left := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(POLL_SECONDS, left))
            operation = await self.get(name)
        return operation

    async def get_own(self, name: str) -> Operation:
        """The operation of this name that runs here. Raises `OperationNotFound`, which names another's coordinator."""
        if (known := self._own.find(name)) is None:
            other = (await self.get(name)).progress.coordinator
            raise OperationNotFound(
                f"operation {name} is at the coordinator {other}, which this one only shows; call that one",
                name=name,
                coordinator=other,
            )
        return known

    async def aclose(self) -> None:
        """Marks the operations that still run here as lost. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._write(age_seconds=LOST_SECONDS)

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._own.changed.clear()
            is_written = False
            try:
                is_written = await self._write()
            except Exception:
                self._log.exception("operations could not be written into the shared layout map")
            if is_written and not self._own.running():
                await self._own.changed.wait()
            else:
                await asyncio.sleep(WRITE_SECONDS)

    async def _write(self, age_seconds: float = 0.0) -> bool:
        """Writes what has changed, up to `MAX_WRITE_BYTES`; returns whether all is written."""
        map_id, owner = self._store.map_id, self._store.owner
        kept = {operation.name: operation for operation in self._own.newest_first()[:MAX_RECORDS]}
        kept |= {operation.name: operation for operation in self._own.running()}
        if not map_id or not (kept or self._written):
            return not kept
        if map_id != self._map_id:
            self._map_id, self._written = map_id, {}
        removed = [name for name in self._written if name not in kept]
        records: dict[str, bytes | None] = dict.fromkeys(removed)
        size_bytes = 0
        for name, operation in kept.items():
            if not self._written.get(name, False) and size_bytes < MAX_WRITE_BYTES:
                record = records[name] = self._seal.encode(owner, operation)
                size_bytes += len(record)
        final = {name: kept[name].done for name in records if name in kept}
        count = await self._store.write_operations(records, self._own.ttl_seconds, age_seconds)
        if count is None:
            return False
        for name in removed:
            del self._written[name]
        self._written |= final
        if count != len(self._written):  # the map lost records: write all again
            self._written.clear()
        return len(self._written) >= len(kept)

    async def _read(self, name: str = "") -> list[Operation]:
        """The operations of other coordinators, or one of them."""
        found: list[Operation] = []
        for owned in await self._store.read_operations(name, MAX_READ_BYTES):
            if owned.owner != self._store.owner:
                found += self._decoded(owned)
        return found

    def _decoded(self, owned: OwnedRecords) -> Iterator[Operation]:
        for name, data in owned.records.items():
            try:
                operation = self._seal.decode(owned.owner, name, data)
            except (ValueError, LmkvError) as error:
                self._log.warning("cannot show the operation %.100s of another coordinator: %s", name, error)
                continue
            if not operation.done and owned.age_seconds >= LOST_SECONDS:
                operation.error = OperationNotFound(
                    f"operation {name} is lost: its coordinator {label(owned.owner)} has stopped, or has left the "
                    "shared layout map; repeat the call with the same request_id, which continues what was done",
                    name=name,
                )
                operation.end_time = operation.create_time
            yield operation
