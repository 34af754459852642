"""Who made the call that is being answered. Set by the gate; read by whoever answers differently for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from lmkv.auth.roles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Somebody whose token is known."""

    name: str
    """What logs call it. Tokens may share a name while one takes the other's place."""
    role: Role
    tenant: str = ""
    """Whose chunks it sees; empty: those of the fleet's own, unnamed tenant."""
    max_requests_per_second: int = 0
    """0: as many as it can."""
    max_concurrent_requests: int = 0
    """Streams included; 0: as many as it can."""
    digest: bytes = field(default=b"", repr=False)
    """Of its token."""


ANONYMOUS_CALLER = Caller(name="anybody", role=Role.ADMIN)
"""Who calls where no tokens are configured, and who probes."""

_current: ContextVar[Caller] = ContextVar("lmkv_caller", default=ANONYMOUS_CALLER)
_check: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_check", default=lambda: None)
_count: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_ask", default=lambda: None)


def current_caller() -> Caller:
    """Who made the call that is being answered."""
    return _current.get()


def check_caller() -> None:
    """Called for each message of a stream. Raises `Unauthenticated` if the caller would not be admitted any more."""
    _check.get()()


def count_request() -> None:
    """Asked before each question of a stream is answered. Raises `TooManyRequests` if who asks is past its limit."""
    _count.get()()


@contextmanager
def caller_context(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> Iterator[None]:
    """Inside, `current_caller` returns `caller`, `check_caller` calls `check` and `count_request` calls `count`."""
    before = _current.get(), _check.get(), _count.get()
    _set(caller, check, count)
    try:
        yield
    finally:
        _set(*before)  # not reset: a stream that is cut off may be ended in another context


def _set(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> None:
    _current.set(caller)
    _check.set(check)
    _count.set(count)
