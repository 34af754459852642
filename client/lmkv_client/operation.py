"""A long-running operation of the coordinator, such as a move, as its client sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar

from google.longrunning.operations_pb2 import CancelOperationRequest, GetOperationRequest, WaitOperationRequest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration

from lmkv.errors import LmkvError, Missing, OperationNotFound, Unreachable
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.error_status import from_status
from lmkv.v1.cache_service_pb2 import (
    ClearProgress,
    ClearResult,
    DrainProgress,
    DrainResult,
    MoveProgress,
    MoveResult,
)

Progress = TypeVar("Progress")
Result = TypeVar("Result")

RETRY_TIMEOUT_SECONDS = 30.0
"""Much longer than the restart of a coordinator takes."""
RETRY_SECONDS = 0.2
WAIT_SECONDS = 900.0
"""Longer than the coordinator's deadline of any operation."""
POLL_SECONDS = 0.5
"""Interval of progress updates."""
HOLD_SECONDS = 20.0
"""The coordinator holds a request for at most this time until the operation completes."""

_KINDS = (MoveProgress, MoveResult, ClearProgress, ClearResult, DrainProgress, DrainResult)


class RetryDeadline:
    """Bounds the time of retries after the last response."""

    def __init__(self, seconds: float = RETRY_TIMEOUT_SECONDS) -> None:
        self._seconds = seconds
        self.extend()

    def extend(self) -> None:
        """Restarts the time, after a response."""
        self._end = time.monotonic() + self._seconds

    async def wait_to_retry(self, error: LmkvError) -> None:
        """Waits before the next attempt. Raises `error` if the time is over."""
        if time.monotonic() > self._end:
            raise error
        await asyncio.sleep(RETRY_SECONDS)


class OperationState(Generic[Progress, Result]):
    """The state of an operation, read from its message."""

    message: Any
    """`google.longrunning.Operation`."""

    @property
    def name(self) -> str:
        """Its id, which LMCache calls `event_id`."""
        return str(self.message.name)

    @property
    def kind(self) -> str:
        """`move`, `copy`, `clear` or `drain`, the prefix of the name."""
        return self.name.partition("-")[0]

    @property
    def done(self) -> bool:
        """Whether it has completed, failed or been cancelled."""
        return bool(self.message.done)

    @property
    def progress(self) -> Progress:
        """Its progress."""
        progress: Progress = _unpack(self.message.metadata)
        return progress

    @property
    def result(self) -> Result | None:
        """Its result; None while it runs and if it failed."""
        return _unpack(self.message.response) if self.message.HasField("response") else None

    @property
    def error(self) -> LmkvError | None:
        """The error with which it failed, or `OperationCancelled`; None while it runs and if it succeeded."""
        return from_status(self.message.error) if self.message.HasField("error") else None

    @property
    def state(self) -> str:
        """`running`, `done`, `failed`, `cancelled`, or `lost` with its coordinator."""
        if not self.done:
            return "running"
        if self.error is None:
            return "done"
        if isinstance(self.error, OperationNotFound):
            return "lost"
        return "cancelled" if self.error.code == "CANCELLED" else "failed"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, {self.state}>"


class Operation(OperationState[Progress, Result]):
    """An operation in its last received state, which `wait`, `refresh` and iteration update.

    It runs whether or not a client waits. The coordinator keeps it for some time after its end; after that every method
    raises `OperationNotFound`. Every method may raise `Unreachable`.

    If the coordinator that runs it fails, who started it and waits for it, or follows its updates, repeats the request
    there or at another coordinator: it continues under another name. Everyone else gets `OperationNotFound`.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        message: Any,
        repeat: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """`repeat` starts it again with the same `request_id`, if it was started here."""
        self._client = client
        self._repeat = repeat
        self._repeat_until = time.monotonic() + WAIT_SECONDS
        self.message = message
        self.is_repeated = False
        """Whether the request was repeated, as its coordinator was lost: then it counts what the repeat did, and what a
        move found at the destination."""

    async def refresh(self) -> None:
        """Updates the state."""
        request = GetOperationRequest(name=self.name)
        self.message = await self._client.find(lambda to: to.call(to.operations.GetOperation, request))

    async def cancel(self) -> None:
        """Requests cancellation, without waiting for it. What the operation has done is not undone."""
        request = CancelOperationRequest(name=self.name)
        await self._client.find(lambda to: to.call(to.operations.CancelOperation, request))

    async def wait(self, timeout_seconds: float = WAIT_SECONDS) -> Result:
        """Waits until it completes, also across the failure of its coordinator, and returns the result.

        A result may list chunks that failed. Raises the operation's error, and `TimeoutError` on timeout, after which
        the operation still runs.
        """
        deadline = time.monotonic() + timeout_seconds
        retry_deadline = RetryDeadline()
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.name} is still running after {timeout_seconds:g} s")
            await self._poll(min(left, HOLD_SECONDS), retry_deadline)
        if self.error:
            raise self.error
        result = self.result
        assert result is not None, "a completed operation has a result or an error"
        return result

    async def updates(self) -> AsyncGenerator[Progress, None]:
        """Yields the progress, now and after each change, until it completes."""
        deadline = RetryDeadline()
        latest = self.progress
        yield latest
        while not self.done:
            await self._poll(POLL_SECONDS, deadline)
            if self.progress != latest:
                latest = self.progress
                yield latest

    def __aiter__(self) -> AsyncGenerator[Progress, None]:
        """As `updates`."""
        return self.updates()

    async def _poll(self, seconds: float, deadline: RetryDeadline) -> None:
        """Updates the state once the operation completes, at the latest after `seconds`."""
        request = WaitOperationRequest(
            name=self.name, timeout=Duration(nanos=round(seconds % 1 * 1e9), seconds=int(seconds))
        )
        try:
            self.message = await self._client.find(
                lambda to: to.call(to.operations.WaitOperation, request, timeout_seconds=to.timeout_seconds + seconds)
            )
            deadline.extend()
        except OperationNotFound as error:
            if self._repeat is None or time.monotonic() > self._repeat_until:
                raise
            await self._continue(self._repeat, error, deadline)
        except Unreachable as error:
            await deadline.wait_to_retry(error)

    async def _continue(
        self, repeat: Callable[[], Awaitable[Any]], unknown: OperationNotFound, deadline: RetryDeadline
    ) -> None:
        """Repeats the request, for the coordinator that ran the operation is gone.

        One that has just started may not know all instances and their chunks: it is asked again for a while.
        """
        try:
            self.message = await repeat()
            self.is_repeated = True
        except (Unreachable, Missing) as error:
            error.add_note(str(unknown))
            await deadline.wait_to_retry(error)
        else:
            deadline.extend()


MoveOperation: TypeAlias = Operation[MoveProgress, MoveResult]
"""A move or a copy."""
ClearOperation: TypeAlias = Operation[ClearProgress, ClearResult]
DrainOperation: TypeAlias = Operation[DrainProgress, DrainResult]


def _unpack(packed: AnyMessage) -> Any:
    for kind in _KINDS:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    raise LmkvError(f"this version of lmkv does not know the type {packed.type_url!r}", type_url=packed.type_url)
