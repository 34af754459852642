"""Threads for the blocking calls of backends, which a process that ends does not wait for."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar


class ThreadBuffer:
    """A buffer for each thread, aligned to pages as direct I/O requires, that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def get(self, size_bytes: int) -> memoryview:
        """The buffer of this thread, of this size or longer, with any content. The thread's next call reuses it."""
        buffer: memoryview | None = getattr(self._buffers, "memory", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.memory = memoryview(mmap.mmap(-1, max(1, size_bytes)))
        return buffer


T = TypeVar("T")


class DaemonThreads(Executor):
    """A `ThreadPoolExecutor` of daemon threads: a call that hangs, as in a folder whose server is gone, ends with the
    process, which the interpreter would otherwise join without a limit.
    """

    def __init__(self, count: int, name: str) -> None:
        """Threads start when they are needed, up to `count`."""
        self._count = count
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_ended = False

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Queues a call. Raises `RuntimeError` after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_ended:
                raise RuntimeError("no call is started after shutdown")
            self._calls.put(_Call(future, function, arguments, named))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once they have no call; with `wait`, returns when they have ended. Idempotent."""
        with self._lock:
            if not self._is_ended:
                self._is_ended = True
                waiting = []
                while cancel_futures and not self._calls.empty():
                    waiting.append(self._calls.get())
                for call in waiting:
                    if call:
                        call.future.cancel()
                for _ in self._threads:
                    self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while call := self._calls.get():
            call.run()
            del call  # it refers to memory
            self._idle.release()


class _Call:
    """A call that waits for a thread."""

    def __init__(
        self, future: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self.future = future
        self._function = function
        self._arguments = arguments
        self._named = named

    def run(self) -> None:
        """Calls the function, unless the future was cancelled, and passes what it returns or raises to the future."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(*self._arguments, **self._named)
        except BaseException as error:  # the caller of the future handles it
            self.future.set_exception(error)
        else:
            self.future.set_result(result)
