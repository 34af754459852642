"""The SDK for code without an event loop: `Coordinator` and the objects it returns, with the same names.

    with Coordinator("head:9000") as coordinator:
        answer = coordinator.lookup(tokens)

Each method runs the asynchronous method of the same name on an event loop in a separate thread. It may be called from
several threads, and also where another event loop is running.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import lmkv_client as aio
from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv.v1.cache_service_pb2 import (
    ClearProgress,
    ClearResult,
    DrainProgress,
    DrainResult,
    MoveProgress,
    MoveResult,
)
from lmkv_client.operation import OperationState

P = ParamSpec("P")
T = TypeVar("T")
Inner = TypeVar("Inner")
Outer = TypeVar("Outer")
Progress = TypeVar("Progress")
Result = TypeVar("Result")

CLOSE_SECONDS = 10.0


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.Lock()
        """Held to submit work and to close, so that no work is submitted to a closed loop."""
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_run_loop, args=(started,), name="lmkv-client", daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result(CLOSE_SECONDS)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and waits for its result. An interrupted wait cancels the work.

        Raises `RuntimeError` if the thread is closed, before or during the call.
        """
        result: Future[T] = Future()  # made before the work starts: an interrupt at any point finds it
        try:
            with self._lock:
                if self.closed:
                    work.close()
                    raise RuntimeError("this coordinator was closed; create another one")
                self._loop.call_soon_threadsafe(_start, work, result)
            return result.result()
        except CancelledError:
            raise RuntimeError("this coordinator was closed during the call") from None
        except BaseException:
            result.cancel()
            raise

    def close(self) -> None:
        """Cancels all work and ends the thread. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise LmkvError(f"the client's event loop did not stop within {CLOSE_SECONDS:.0f} s")


def _start(work: Coroutine[Any, Any, T], result: Future[T]) -> None:
    """Runs `work` as a task of this thread's loop and passes its outcome to `result`.

    A cancelled `result` cancels the task, also before it started.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)

    def pass_on(done: asyncio.Task[T]) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            result.cancel()
        elif result.set_running_or_notify_cancel():
            if error:
                result.set_exception(error)
            else:
                result.set_result(done.result())

    def cancel(future: Future[T]) -> None:
        if future.cancelled() and not task.done():
            loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(pass_on)
    result.add_done_callback(cancel)


def _run_loop(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Runs the loop until it is stopped, then cancels its tasks."""

    async def serve() -> None:
        stop = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    asyncio.run(serve())


class _SyncWrapper(Generic[Inner]):
    """Synchronous wrapper of an object of the thread's loop."""

    def __init__(self, thread: _LoopThread, inner: Inner) -> None:
        self._thread = thread
        self._inner = inner


def _blocking(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_SyncWrapper[Inner], P], T]:
    """A method that waits for the asynchronous `method`."""

    @functools.wraps(method)
    def call(self: _SyncWrapper[Inner], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


def _wrapping(
    method: Callable[Concatenate[Inner, P], Coroutine[Any, Any, T]], wrap: Callable[[_LoopThread, T], Outer]
) -> Callable[Concatenate[_SyncWrapper[Inner], P], Outer]:
    """A method that waits for the asynchronous `method` and wraps its result."""

    @functools.wraps(method)
    def call(self: _SyncWrapper[Inner], /, *args: P.args, **kwargs: P.kwargs) -> Outer:
        return wrap(self._thread, self._thread.run(method(self._inner, *args, **kwargs)))

    return call


def _iterating(
    method: Callable[Concatenate[Inner, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[_SyncWrapper[Inner], P], Iterator[T]]:
    """Wraps an asynchronous iterator as a plain iterator."""

    @functools.wraps(method)
    def call(self: _SyncWrapper[Inner], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        steps = method(self._inner, *args, **kwargs)
        try:
            while True:
                try:
                    yield self._thread.run(_next(steps))
                except StopAsyncIteration:
                    return
        finally:
            if not self._thread.closed:
                self._thread.run(steps.aclose())

    return call


async def _next(steps: AsyncGenerator[T, None]) -> T:
    return await anext(steps)


class Operation(OperationState[Progress, Result], _SyncWrapper[aio.Operation[Progress, Result]]):
    """As `lmkv_client.Operation`; `for progress in operation` waits for its end."""

    refresh = _blocking(aio.Operation[Progress, Result].refresh)
    cancel = _blocking(aio.Operation[Progress, Result].cancel)
    wait = _blocking(aio.Operation[Progress, Result].wait)
    updates = _iterating(aio.Operation[Progress, Result].updates)
    __iter__ = updates

    @property
    def message(self) -> Any:
        """`google.longrunning.Operation`."""
        return self._inner.message

    @property
    def is_repeated(self) -> bool:
        """As `lmkv_client.Operation.is_repeated`."""
        return self._inner.is_repeated


class LookupStream(_SyncWrapper[aio.LookupStream]):
    """As `lmkv_client.LookupStream`; its calls may come from several threads."""

    lookup = _blocking(aio.LookupStream.lookup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As `lmkv_client.LookupStream.aclose`."""
        if not self._thread.closed:
            self._thread.run(self._inner.aclose())


def _operations(thread: _LoopThread, inner: list[aio.Operation[Any, Any]]) -> list[Operation[Any, Any]]:
    return [Operation(thread, operation) for operation in inner]


class Coordinator(_SyncWrapper[aio.Coordinator]):
    """As `lmkv_client.Coordinator`. Iterators, such as that of `watch`, end with it."""

    def __init__(
        self,
        address: str,
        *other_addresses: str,
        timeout_seconds: float = 5.0,
        credentials: Credentials = PLAINTEXT,
        token: str = "",
    ) -> None:
        thread = _LoopThread()

        async def connect() -> aio.Coordinator:  # on the loop that it belongs to
            return aio.Coordinator(
                address, *other_addresses, timeout_seconds=timeout_seconds, credentials=credentials, token=token
            )

        super().__init__(thread, thread.run(connect()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not self._thread.closed:
            warnings.warn(f"{type(self).__name__} was not closed", ResourceWarning, source=self, stacklevel=2)

    def close(self) -> None:
        """Closes the connection, and ends the thread. Repeating it is safe."""
        if not self._thread.closed:
            self._thread.run(self._inner.aclose())
            self._thread.close()

    @property
    def address(self) -> str:
        """`host:port` of the coordinator."""
        return self._inner.address

    def lookup_stream(self) -> LookupStream:
        """As `lmkv_client.Coordinator.lookup_stream`."""
        return LookupStream(self._thread, self._inner.lookup_stream())

    lookup = _blocking(aio.Coordinator.lookup)
    explain = _blocking(aio.Coordinator.explain)
    move = _wrapping(aio.Coordinator.move, Operation[MoveProgress, MoveResult])
    copy = _wrapping(aio.Coordinator.copy, Operation[MoveProgress, MoveResult])
    pin = _blocking(aio.Coordinator.pin)
    unpin = _blocking(aio.Coordinator.unpin)
    hint = _blocking(aio.Coordinator.hint)
    pins = _blocking(aio.Coordinator.pins)
    clear = _wrapping(aio.Coordinator.clear, Operation[ClearProgress, ClearResult])
    drain = _wrapping(aio.Coordinator.drain, Operation[DrainProgress, DrainResult])
    operation = _wrapping(aio.Coordinator.operation, Operation[Any, Any])
    operations = _wrapping(aio.Coordinator.operations, _operations)
    instances = _blocking(aio.Coordinator.instances)
    watch = _iterating(aio.Coordinator.watch)
