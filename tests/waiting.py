"""Waits for conditions. No test sleeps a fixed time or asserts that something is fast: a busy host is not a failure."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

WAIT_SECONDS = 40.0
"""Maximum time for anything that happens soon on an idle host: less than the timeout of a test (pyproject.toml)."""
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


def is_listening(path: Path) -> bool:
    """Whether a server accepts connections at this unix socket. The file exists before, from `bind` on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def wake_ups(thread_name: str) -> int:
    """How often the threads of this process that have the name have slept so far: what a thread that polls does."""
    count = 0
    for thread in threading.enumerate():
        if thread.name == thread_name:
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            count += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def rests(cpu_seconds: Callable[[], float], window_seconds: float = 0.5) -> bool:
    """Whether less than a tenth of a processor is used for half a second. To be waited for, in a thread if need be."""
    before, began = cpu_seconds(), time.monotonic()
    time.sleep(window_seconds)
    return cpu_seconds() - before < 0.1 * (time.monotonic() - began)


def wait_until(
    condition: Callable[[], object], what: str = "the condition", timeout_seconds: float = WAIT_SECONDS
) -> None:
    """As `until`, for tests without an event loop."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_seconds:g} s, it does not hold: {what}"
        time.sleep(POLL_SECONDS)
