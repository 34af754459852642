"""The caller of the RPC that a handler answers, in context variables that `Authenticator` sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from lmkv.auth.roles import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """An authenticated caller."""

    name: str
    """Its name in logs. Two tokens may share a name while one replaces the other."""
    role: Role
    tenant: str = ""
    """The tenant whose chunks it sees; empty: the unnamed tenant."""
    max_requests_per_second: int = 0
    """0: unlimited."""
    max_concurrent_requests: int = 0
    """Including streams; 0: unlimited."""
    digest: bytes = field(default=b"", repr=False)
    """SHA-256 of its token."""


ANONYMOUS_CALLER = Caller(name="anonymous", role=Role.ADMIN)
"""The caller where no tokens are configured, and of health probes."""

_current: ContextVar[Caller] = ContextVar("lmkv_caller", default=ANONYMOUS_CALLER)
_check: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_check", default=lambda: None)
_count: ContextVar[Callable[[], None]] = ContextVar("lmkv_caller_ask", default=lambda: None)


def current_caller() -> Caller:
    """The caller of the RPC that is being answered."""
    return _current.get()


def check_caller() -> None:
    """Checks the caller again, for each message of a stream. Raises `Unauthenticated` if it is no longer admitted."""
    _check.get()()


def count_request() -> None:
    """Counts one request of a stream. Raises `TooManyRequests` if the caller exceeds its rate limit."""
    _count.get()()


@contextmanager
def caller_context(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> Iterator[None]:
    """Inside, `current_caller` returns `caller`, `check_caller` calls `check` and `count_request` calls `count`."""
    before = _current.get(), _check.get(), _count.get()
    _set(caller, check, count)
    try:
        yield
    finally:
        _set(*before)  # not `reset`: an aborted stream may be closed in another context


def _set(caller: Caller, check: Callable[[], None], count: Callable[[], None]) -> None:
    _current.set(caller)
    _check.set(check)
    _count.set(count)
