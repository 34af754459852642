"""Work that the coordinator does in the background, a move or a clear, as its caller sees it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeAlias, TypeVar

from google.longrunning.operations_pb2 import CancelOperationRequest, GetOperationRequest, WaitOperationRequest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from lmkv.errors import LmkvError, Unreachable
from lmkv.rpc.endpoints import from_status
from lmkv.v1.cache_service_pb2 import ClearProgress, ClearResult, MoveProgress, MoveResult
from lmkv_client.connection import Patience
from lmkv_client.connections import Connections

Progress = TypeVar("Progress")
Result = TypeVar("Result")

WAIT_SECONDS = 900.0
"""More than the coordinator gives any operation."""
POLL_SECONDS = 0.5
"""How often progress is told, if there is any."""
HOLD_SECONDS = 20.0
"""How long the coordinator is asked to hold back an answer until there is something to tell."""

_KINDS = (MoveProgress, MoveResult, ClearProgress, ClearResult)


class OperationState(Generic[Progress, Result]):
    """What is known of an operation, from its message."""

    message: Any
    """`google.longrunning.Operation`."""

    @property
    def name(self) -> str:
        """Its id, which LMCache calls `event_id`."""
        return str(self.message.name)

    @property
    def kind(self) -> str:
        """`move`, `copy` or `clear`: names begin with it."""
        return self.name.partition("-")[0]

    @property
    def done(self) -> bool:
        """Whether it is over, one way or the other."""
        return bool(self.message.done)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        progress: Progress = _unpack(self.message.metadata)
        return progress

    @property
    def result(self) -> Result | None:
        """What it did; None while it runs, and if it failed."""
        return _unpack(self.message.response) if self.message.HasField("response") else None

    @property
    def error(self) -> LmkvError | None:
        """Why it failed, with `OperationCancelled` if somebody wanted it to; None while it runs, and if it did not."""
        return from_status(self.message.error) if self.message.HasField("error") else None

    @property
    def state(self) -> str:
        """`running`, `done`, `failed` or `cancelled`."""
        if not self.done:
            return "running"
        if self.error is None:
            return "done"
        return "cancelled" if self.error.code == "CANCELLED" else "failed"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self.state}>"


class Operation(OperationState[Progress, Result]):
    """An operation, in the state that it was last heard of: `wait`, `refresh` and iteration ask anew.

    It goes on whether or not anybody waits, and is known by its name for some time after its end. Every method raises
    `OperationNotFound` once it is not, and `Unreachable`.

    Every coordinator knows it. If the one that sees it through is lost, another one does.
    """

    def __init__(self, connections: Connections, message: Any) -> None:
        self._connections = connections
        self.message = message

    async def refresh(self) -> None:
        """Asks what has become of it."""
        request = GetOperationRequest(name=self.name)
        self.message = await self._connections.call(lambda to: to.operations.GetOperation, request)

    async def cancel(self) -> None:
        """Asks for it to stop, which takes a moment: `wait` tells. What it has done so far stays done."""
        request = CancelOperationRequest(name=self.name)
        await self._connections.call(lambda to: to.operations.CancelOperation, request)

    async def wait(self, timeout_seconds: float = WAIT_SECONDS) -> Result:
        """Waits for its end, also through the loss of its coordinator, and returns what it did.

        A result may list chunks that it failed for. Raises the error that the operation ended with, and `TimeoutError`
        if it does not end in time; it then still runs.
        """
        deadline = time.monotonic() + timeout_seconds
        patience = Patience()
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name} still runs after {timeout_seconds:g} s")
            await self._poll(min(left, HOLD_SECONDS), patience)
        if self.error:
            raise self.error
        result = self.result
        assert result is not None, "what is done has a result or an error"
        return result

    async def updates(self) -> AsyncGenerator[Progress, None]:
        """Yields how far it is, now and whenever that has changed, until it is over."""
        patience = Patience()
        told = self.progress
        yield told
        while not self.done:
            await self._poll(POLL_SECONDS, patience)
            if self.progress != told:
                told = self.progress
                yield told

    def __aiter__(self) -> AsyncGenerator[Progress, None]:
        """As `updates`."""
        return self.updates()

    async def _poll(self, seconds: float, patience: Patience) -> None:
        """Hears of it once it is over, or after so many seconds."""
        request = WaitOperationRequest(
            name=self.name, timeout=Duration(nanos=round(seconds % 1 * 1e9), seconds=int(seconds))
        )
        try:
            self.message = await self._connections.ask(
                lambda to: to.call(to.operations.WaitOperation, request, seconds)
            )
            patience.renew()
        except Unreachable as error:
            await patience.endure(error)


MoveOperation: TypeAlias = Operation[MoveProgress, MoveResult]
"""A move or a copy."""
ClearOperation: TypeAlias = Operation[ClearProgress, ClearResult]


def _unpack(packed: AnyMessage) -> Any:
    for kind in _KINDS:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    raise LmkvError(f"this version of lmkv does not know what {packed.type_url!r} is", type_url=packed.type_url)
