"""The memory that decoded requests of one process may take, with a share per caller.

Decoded requests are many times larger than what arrives: a list of numbers in Python takes up to 36 bytes a number, and
one or two bytes in the message. Code that decodes a message of another process takes the bytes that it may become
from the budget first, and returns them with the answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import resource
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lmkv.errors import TooManyRequests

DECODED_PROTOBUF_FACTOR = 16
"""Bytes in memory of a protobuf message per byte that arrives. Measured: 8 for token ids and keys, 12 for names."""
JSON_VALUE_BYTES = 80
"""Bytes in memory of a JSON value besides its text: an empty object in a list."""
WIDE_CHARACTER_BYTES = 4
"""Bytes in memory of a character of text that is not ASCII."""
LIMIT_FRACTION = 4
"""The budget is this part of the memory that the process may have, and at least `MIN_BYTES`."""
MIN_BYTES = 32 << 20
CALLER_FRACTION = 2
"""What one caller may hold: this part of the budget, or one request that is larger."""
LONE_FRACTION = 2
"""A request that is alone may take this multiple of the budget: half of the memory that the process may have."""
WAIT_SECONDS = 5.0
"""How long a message waits for its bytes."""
TRIM_FROM_BYTES = 32 << 20
"""What requests must have held at once for memory to be returned to the system when the last of them ends."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class MemoryBudget:
    """Bytes for the requests of one process. Used on one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._by_caller: dict[str, int] = {}
        self._peak_bytes = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def take(self, caller: str, size_bytes: int) -> Lease:
        """Takes bytes for a caller. Raises `TooManyRequests` if the budget or the caller's share lacks them."""
        lease = Lease(self, caller)
        lease.grow(size_bytes)
        return lease

    async def acquire(self, caller: str, size_bytes: int, wait_seconds: float = WAIT_SECONDS) -> Lease:
        """As `take`, after a wait of at most `wait_seconds`."""
        lease = Lease(self, caller)
        await lease.acquire(size_bytes, wait_seconds)
        return lease

    def has_room(self, caller: str, size_bytes: int) -> bool:
        """Whether a caller may take so much now."""
        if size_bytes > LONE_FRACTION * self.capacity_bytes:
            return False
        if self.held_bytes and self.held_bytes + size_bytes > self.capacity_bytes:
            return False
        held = self._by_caller.get(caller, 0)
        return not held or held + size_bytes <= self.capacity_bytes // CALLER_FRACTION

    def add(self, caller: str, size_bytes: int) -> None:
        """Counts bytes of a caller, or fewer if negative."""
        self.held_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        held = self._by_caller.get(caller, 0) + size_bytes
        if held:
            self._by_caller[caller] = held
        else:
            self._by_caller.pop(caller, None)
        if size_bytes < 0:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
        if not self.held_bytes and self._peak_bytes >= TRIM_FROM_BYTES:
            self._peak_bytes = 0
            _trim()

    async def changed(self, wait_seconds: float) -> None:
        """Waits until bytes are returned. Raises `TimeoutError`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            async with asyncio.timeout(wait_seconds):
                await future
        finally:
            self._waiting.discard(future)


class Lease:
    """Bytes of one request, returned when it is closed, once. A context manager."""

    def __init__(self, budget: MemoryBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self.size_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """Takes more bytes. Raises `TooManyRequests`."""
        if not self._budget.has_room(self._caller, size_bytes):
            raise self._full(size_bytes)
        self._add(size_bytes)

    async def acquire(self, size_bytes: int, wait_seconds: float = WAIT_SECONDS) -> None:
        """Has this number of bytes instead of those so far; waits for more at most `wait_seconds`, with none held."""
        self.close()
        deadline = asyncio.get_running_loop().time() + wait_seconds
        while not self._budget.has_room(self._caller, size_bytes):
            try:
                await self._budget.changed(deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                raise self._full(size_bytes) from None
        self._add(size_bytes)

    def close(self) -> None:
        """Returns the bytes. Idempotent."""
        self._add(-self.size_bytes)

    def _add(self, size_bytes: int) -> None:
        if size_bytes:
            self.size_bytes += size_bytes
            self._budget.add(self._caller, size_bytes)

    def _full(self, size_bytes: int) -> TooManyRequests:
        return TooManyRequests(
            f"requests that are being answered hold {self._budget.held_bytes} of {self._budget.capacity_bytes} bytes, "
            f"of which one caller may have half, and this one needs {size_bytes}; send it again later, or in parts",
            retry_seconds=1.0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def of_process() -> MemoryBudget:
    """The budget of this process."""
    return MemoryBudget(budget_bytes())


def budget_bytes(reserved_bytes: int = 0) -> int:
    """The budget of a process that needs `reserved_bytes` for something else, as a node for its pool."""
    return max((memory_limit() - reserved_bytes) // LIMIT_FRACTION, MIN_BYTES)


def memory_limit() -> int:
    """Bytes that this process may use: the least of the host's, its cgroup's and its own limit (`ulimit -d`)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # `max` is no number
            limits.append(int(Path(path).read_text()))
    own, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return min(limits if own == resource.RLIM_INFINITY else [*limits, own])


def json_bytes(body: bytes) -> int:
    """An upper bound of the memory that a JSON text takes once it is decoded, the text itself included."""
    values = sum(body.count(mark) for mark in (b",", b"[", b"{", b":"))
    text = len(body) * (1 if body.isascii() else WIDE_CHARACTER_BYTES)
    return len(body) + text + values * JSON_VALUE_BYTES


def _trim() -> None:
    """Returns free memory of the allocator to the system, where that has such a call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
