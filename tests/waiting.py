"""Waits for conditions. No test sleeps a fixed time or asserts that something is fast: a busy host is not a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

WAIT_SECONDS = 40.0
"""Maximum time for anything that happens soon on an idle host. Less than the timeout of a test (pyproject.toml)."""
POLL_SECONDS = 0.005

Answer = TypeVar("Answer")


async def until(
    condition: Callable[[], object], what: str = "the condition", timeout_seconds: float = WAIT_SECONDS
) -> None:
    """Waits, while the event loop runs, until the condition holds; fails if it never does."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_seconds:g} s, it does not hold: {what}"
        await asyncio.sleep(POLL_SECONDS)


async def eventually(
    ask: Callable[[], Awaitable[Answer]], expected: Answer, timeout_seconds: float = WAIT_SECONDS
) -> None:
    """Asks until the answer is the expected one; fails with the last answer if it never is."""
    deadline = time.monotonic() + timeout_seconds
    while (answer := await ask()) != expected:
        assert time.monotonic() < deadline, f"after {timeout_seconds:g} s, the answer is {answer!r}, not {expected!r}"
        await asyncio.sleep(POLL_SECONDS)


def wait_until(
    condition: Callable[[], object], what: str = "the condition", timeout_seconds: float = WAIT_SECONDS
) -> None:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_seconds:g} s, it does not hold: {what}"
        time.sleep(POLL_SECONDS)
