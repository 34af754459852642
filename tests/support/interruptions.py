"""Interrupts coroutines at each of their awaits in turn: what they hold, count and have others wait for must be undone.

interrupter = Interrupter(monkeypatch, (Service, "Handler"))  # before the server starts
for _ in interrupter.every_await():
    ...  # calls, which may fail, and what must hold afterwards
"""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

MOST_AWAITS = 2_000
"""A scenario with more never ends, or is too long to be repeated for each."""


class Kind(enum.Enum):
    """What happens at the await."""

    CANCEL = "the task is cancelled while it waits"
    CANCEL_LATE = "the task is cancelled when the result has arrived, and before it has run again"
    FAIL = "what it waits for fails"


class Injected(Exception):
    """The failure of an await."""


class Interruption:
    """One interruption, at one of the awaits of all coroutines that it wraps together."""

    def __init__(self, at: int, kind: Kind) -> None:
        self._left = at
        self._kind = kind
        self.place = ""
        """The await that was interrupted; empty if there were fewer."""

    def __str__(self) -> str:
        return f"{self._kind.value}: {self.place or 'nothing'}"

    def end(self) -> None:
        """Interrupts nothing from now on."""
        self._left = MOST_AWAITS * MOST_AWAITS

    async def wrap(self, work: Awaitable[T]) -> T:
        """Awaits the work, with the interruption if it is its turn."""
        return await _Interrupted(work, self)

    def stops_at(self, place: str) -> bool:
        """Counts a response, which can fail, too. Returns whether it is its turn."""
        self._left -= 1
        if self._left >= 0 or self.place or self._kind is not Kind.FAIL:
            return False
        self.place = place
        return True

    def cuts_at(self, place: str) -> Kind | None:
        """Counts a call. Returns the kind of the interruption if it is its turn."""
        self._left -= 1
        if self._left >= 0 or self.place:
            return None
        self.place = place
        return self._kind

    def reached(self, future: Any, place: str) -> bool:
        """Counts an await; interrupts it if it is its turn. Returns whether it is to fail at once."""
        self._left -= 1
        if self._left >= 0 or self.place:
            return False
        task = asyncio.current_task()
        assert task is not None
        if self._kind is Kind.FAIL and future is None:
            return False
        self.place = place
        if self._kind is Kind.FAIL:
            return True
        if self._kind is Kind.CANCEL_LATE and future is not None:
            future.add_done_callback(lambda _: task.cancel())  # before the task's own callback
        else:
            task.cancel()
        return False


class _Interrupted(Awaitable[T]):
    def __init__(self, work: Awaitable[T], interruption: Interruption) -> None:
        self._work = work
        self._interruption = interruption

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        resume: Callable[[Any], Any] = steps.send
        value: Any = None
        while True:
            try:
                future = resume(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            if self._interruption.reached(future, _place_of(self._work)):
                future._asyncio_future_blocking = False
                if not isinstance(future, asyncio.Task):  # nothing waits for it any more, as after a cancellation
                    future.cancel()
                resume, value = steps.throw, Injected("as the test demands")
                continue
            try:
                resume, value = steps.send, (yield future)
            except BaseException as error:
                resume, value = steps.throw, error


class Interrupter:
    """Interrupts the calls of methods, which are coroutines or asynchronous generators."""

    def __init__(self, patch: pytest.MonkeyPatch, *methods: tuple[type, str], are_handlers: bool = False) -> None:
        """`are_handlers`: calls that are cancelled are answered with an error, since no client has cancelled them."""
        self._current = Interruption(MOST_AWAITS, Kind.CANCEL)
        self._are_handlers = are_handlers
        for owner, name in methods:
            self._watch(patch, owner, name)

    def every_await(self, *kinds: Kind, may_be_none: bool = False) -> Iterator[Interruption]:
        """An interruption for each await that is reached, by each kind (default: all): one at a time is in effect.

        `may_be_none`: the calls may end without having waited.
        """
        for kind in kinds or Kind:
            for at in range(MOST_AWAITS):
                self._current = Interruption(at, kind)
                try:
                    yield self._current
                finally:
                    self._current.end()
                if not self._current.place:
                    assert at or may_be_none, f"nothing is tested: no await for {kind}"
                    break
            else:
                raise AssertionError(f"there are more than {MOST_AWAITS} awaits")

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._are_handlers or not self._current.place or task is None or task.uncancel():
                raise
            raise Injected("as the test demands") from None

    def _watch(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        async def call(*arguments: Any, **options: Any) -> Any:
            with self._answered():
                return await self._current.wrap(method(*arguments, **options))

        @functools.wraps(method)
        async def stream(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            items = method(*arguments, **options)
            while True:
                try:
                    with self._answered():
                        item = await self._current.wrap(anext(items))
                except StopAsyncIteration:
                    return
                if self._current.stops_at(f"a response of {name} is sent"):
                    await items.aclose()
                    raise Injected("as the test demands")
                yield item

        patch.setattr(owner, name, call if inspect.iscoroutinefunction(method) else stream)


class Cutter:
    """Ends connections between threads at each call of methods in turn: before the call, or after it."""

    def __init__(self, patch: pytest.MonkeyPatch, *methods: tuple[type, str], cut: Callable[[Any], None]) -> None:
        """`cut` is called with the object whose method is called."""
        self._current = Interruption(MOST_AWAITS * MOST_AWAITS, Kind.CANCEL)
        self._cut = cut
        self._lock = threading.Lock()
        for owner, name in methods:
            self._watch(patch, owner, name)

    def every_await(self, *_: Kind, may_be_none: bool = False) -> Iterator[Interruption]:
        """An interruption for each call that is reached: one at a time is in effect."""
        for kind in (Kind.CANCEL, Kind.CANCEL_LATE):
            for at in range(MOST_AWAITS):
                self._current = Interruption(at, kind)
                yield self._current
                self._current.end()
                if not self._current.place:
                    assert at or may_be_none, "nothing is tested: no call"
                    break

    def _watch(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(one: Any, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                kind = self._current.cuts_at(f"{owner.__name__}.{name}")
            if kind is Kind.CANCEL:
                self._cut(one)
            try:
                return method(one, *arguments, **options)
            finally:
                if kind is Kind.CANCEL_LATE:
                    self._cut(one)

        patch.setattr(owner, name, call)


def _place_of(work: Any) -> str:
    """The line of the innermost coroutine of lmkv that waits."""
    place = type(work).__name__
    while work is not None:
        frame = next(
            (frame for name in ("cr_frame", "gi_frame", "ag_frame") if (frame := getattr(work, name, None))), None
        )
        if frame is not None and "lmkv" in frame.f_code.co_filename:
            place = f"{frame.f_code.co_filename.rpartition('/lmkv')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        work = next(
            (inner for name in ("cr_await", "gi_yieldfrom", "ag_await") if (inner := getattr(work, name, None))), None
        )
    return place
