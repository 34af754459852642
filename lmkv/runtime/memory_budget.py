"""The memory that decoded requests of one process may take, with a share per caller.

Decoded requests are many times larger than what arrives: a list of numbers in Python takes up to 36 bytes a number, and
one or two bytes in the message. Code that reads a message of another process takes the bytes that it may become from
the budget first, and returns them with the answer.

A caller may hold as much as all callers leave free: alone half of the budget, one of two a third, so that there is
always room for one more. Requests that wait are served in the order of arrival, and callers in turn. Requests of other
callers overtake one for which there is no room, but not for long: then none of them begins until it is served. Small
requests pass beside large ones, also of their own caller: a gateway is one caller, and sends those of all its users.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import resource
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from lmkv.errors import TooManyRequests

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Limits from here on are none: version 1 has the largest number of whole pages."""
DECODED_PROTOBUF_FACTOR = 16
"""Bytes in memory of a protobuf message per byte that arrives. Measured: 8 for token ids and keys, 12 for names."""
JSON_VALUE_BYTES = 80
"""Bytes in memory of a JSON value besides its text: an empty object in a list."""
MAX_JSON_VALUES = 2 << 20
"""Values of a body, such as token ids: decoding them takes 20 to 60 ms, in which no other request is served."""
MAX_JSON_OBJECTS = 1 << 18
"""Objects, lists and texts of a body, names of fields included: each takes as long as several numbers."""
WIDE_CHARACTER_BYTES = 4
"""Bytes in memory of a character of text that is not ASCII."""
LIMIT_FRACTION = 4
"""The budget is this part of the memory that the process may have, and at least `MIN_BYTES`."""
MIN_BYTES = 32 << 20
CALLER_FRACTION = 2
"""Share of the budget that one caller may hold while it is alone; one request may be larger."""
LONE_FRACTION = 2
"""A request that is alone may take this multiple of the budget: half of the memory that the process may have."""
SMALL_FRACTION = 64
"""Fraction 1/n of the budget that small requests of one caller may hold together without waiting for large requests."""
SPARE_FRACTION = 4
"""Fraction 1/n of the budget that small requests of all callers may hold beside requests that take all of it."""
WAIT_SECONDS = 5.0
"""Longest time that a message waits for its bytes."""
OVERTAKEN_SECONDS = 0.5
"""A request that has waited this long is overtaken no more, for `RESERVED_SECONDS`: no other large one begins."""
RESERVED_SECONDS = 1.0
"""After that, large requests begin again for as long: a request that can never be served stops no others."""
_LOOK_SECONDS = 0.05
TRIM_FROM_BYTES = 32 << 20
"""Bytes that requests must have taken before memory is returned to the system."""
TRIM_SECONDS = 1.0
"""Memory is returned once requests have taken less than that in this time: returning it takes time itself."""
REUSED_BYTES = 64 << 20
"""Freed blocks up to this size are used again, not returned to the system one by one: getting 32 MB of fresh memory
takes longer than decoding them."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Options of glibc's allocator."""


class MemoryBudget:
    """Bytes for the requests of one process. Used on one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._held: dict[str, int] = {}
        self._small: dict[str, int] = {}
        """Bytes that small requests hold, by caller. They do not count against large requests."""
        self._small_bytes = 0
        self._idle: dict[str, int] = {}
        """Bytes that waiting large requests hold, by caller. They do not count against the turns of these requests."""
        self._idle_bytes = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        """Waiting requests by caller, in the order of the callers' turns."""
        self._reserved: Lease | None = None
        """The lease of the request that others do not overtake now."""
        self._reserves_from = 0.0
        """When the next request may stop others."""
        self._taken_bytes = 0
        """Since the last look at whether memory can be returned."""
        self._looks_at = -TRIM_SECONDS
        """When it is due. One on a loop that has ended never comes."""

    def take(self, caller: str, size_bytes: int) -> Lease:
        """Takes bytes for a caller. Raises `TooManyRequests` if the budget or the caller's share lacks them."""
        lease = Lease(self, caller)
        lease.grow(size_bytes)
        return lease

    async def acquire(self, caller: str, size_bytes: int, wait_seconds: float = WAIT_SECONDS) -> Lease:
        """Takes the bytes as `take` does, after a wait of at most `wait_seconds`."""
        lease = Lease(self, caller)
        try:
            await lease.acquire(size_bytes, wait_seconds)
        except BaseException:
            lease.close()
            raise
        return lease

    @property
    def waiting_count(self) -> int:
        """Requests that wait."""
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def small_bytes(self) -> int:
        """Maximum bytes of one small request, and of all small requests of a caller together."""
        return self.capacity_bytes // SMALL_FRACTION

    def passes(self, lease: Lease, size_bytes: int) -> bool:
        """Whether a lease that takes so much more is one of a small request, for which there is room beside all others.

        Such a request waits for no other one.
        """
        return (
            lease.size_bytes == lease.small_bytes
            and self._small.get(lease.caller, 0) + size_bytes <= self.small_bytes
            and self.held_bytes + size_bytes <= self._most_bytes
        )

    def has_room(self, lease: Lease, size_bytes: int) -> bool:
        """Whether a lease may take so much more now."""
        if self.passes(lease, size_bytes):
            return True
        if self._reserved not in (None, lease) and lease.size_bytes == lease.small_bytes:
            return False
        held_bytes, caller = self.held_bytes, lease.caller
        large_bytes = held_bytes - self._small_bytes
        if held_bytes + size_bytes > self.capacity_bytes and (
            large_bytes > self._idle_bytes
            or large_bytes + size_bytes > LONE_FRACTION * self.capacity_bytes
            or held_bytes + size_bytes > self._most_bytes
        ):
            return False
        held = self._held.get(caller, 0)
        is_first = held - self._small.get(caller, 0) <= self._idle.get(caller, 0)
        return is_first or held + size_bytes <= (CALLER_FRACTION - 1) * (self.capacity_bytes - held_bytes)

    @property
    def _most_bytes(self) -> int:
        return LONE_FRACTION * self.capacity_bytes + self.capacity_bytes // SPARE_FRACTION

    def has_waiting(self, caller: str) -> bool:
        """Whether requests of a caller wait, behind which others must queue."""
        return caller in self._waiting

    def add(self, lease: Lease, size_bytes: int) -> None:
        """Counts bytes of a lease, which has them already, or fewer if negative: those that wait may have them."""
        self.held_bytes += size_bytes
        _count(self._held, lease.caller, size_bytes)
        before_bytes = lease.small_bytes
        lease.small_bytes = lease.size_bytes if lease.size_bytes <= self.small_bytes else 0
        self._small_bytes += lease.small_bytes - before_bytes
        _count(self._small, lease.caller, lease.small_bytes - before_bytes)
        if size_bytes < 0:
            self._serve()
            return
        self._taken_bytes += size_bytes
        if self._taken_bytes >= TRIM_FROM_BYTES and time.monotonic() > self._looks_at + TRIM_SECONDS:
            self._look_later()

    async def wait(self, lease: Lease, size_bytes: int, wait_seconds: float) -> None:
        """Waits until a lease has got so much more. What it holds meanwhile is counted. Raises `TimeoutError`."""
        caller = lease.caller
        loop = asyncio.get_running_loop()
        waiter = _Waiter(lease, size_bytes, loop.create_future(), loop.create_future())
        queue = self._waiting.setdefault(caller, deque())
        queue.append(waiter)
        _lead(queue)
        idle_bytes = lease.size_bytes - lease.small_bytes
        self._count_idle(caller, idle_bytes)
        try:
            self._serve()  # what this one holds may be all that stands in the way of another
            async with asyncio.timeout(wait_seconds):
                await asyncio.wait([waiter.served], timeout=OVERTAKEN_SECONDS)
                # Of hundreds that wait, only those that are next look again and again.
                await asyncio.wait([waiter.served, waiter.leads], return_when=asyncio.FIRST_COMPLETED)
                while not waiter.served.done():
                    await self._wait_for_rest(waiter)
        finally:
            self._count_idle(caller, -idle_bytes)
            self._forget(caller, waiter)

    async def _wait_for_rest(self, waiter: _Waiter) -> None:
        """Waits a while; if it is the turn of this caller, no other large request begins meanwhile."""
        caller = next(iter(self._waiting))
        if self._reserved or waiter is not self._waiting[caller][0] or time.monotonic() < self._reserves_from:
            await asyncio.wait([waiter.served], timeout=_LOOK_SECONDS)
            return
        self._reserved = waiter.lease
        try:
            await asyncio.wait([waiter.served], timeout=RESERVED_SECONDS)
        finally:
            self._reserved = None
            self._reserves_from = time.monotonic() + RESERVED_SECONDS
            if caller in self._waiting:
                self._waiting.move_to_end(caller)
            self._serve()

    def _count_idle(self, caller: str, size_bytes: int) -> None:
        self._idle_bytes += size_bytes
        _count(self._idle, caller, size_bytes)

    def _forget(self, caller: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            _lead(queue)
            if not queue:
                del self._waiting[caller]
            self._serve()  # it may have been in front of smaller ones

    def _serve(self) -> None:
        """Gives what is free to those that wait: to the first of each caller, one caller after the other."""
        has_served = True
        while has_served:
            has_served = False
            for caller in list(self._waiting):
                queue = self._waiting[caller]
                first = queue[0]
                if not first.served.done() and not self.has_room(first.lease, first.size_bytes):
                    continue
                queue.popleft()
                _lead(queue)
                if not queue:
                    del self._waiting[caller]
                else:
                    self._waiting.move_to_end(caller)
                if not first.served.done():  # else it waits no longer
                    first.lease.add(first.size_bytes)
                    first.served.set_result(None)
                has_served = True

    def _look_later(self, *, is_last: bool = False) -> None:
        self._taken_bytes = 0
        with suppress(RuntimeError):  # the event loop has ended
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._look, is_last)
            self._looks_at = time.monotonic() + TRIM_SECONDS

    def _look(self, is_last: bool) -> None:
        """Returns memory to the system, unless requests still take much.

        It does so again while others wait, and once more after that: gRPC holds what has arrived of their messages, and
        frees it when they are refused.
        """
        if max(self._taken_bytes, self.held_bytes) >= TRIM_FROM_BYTES:
            self._look_later()
            return
        self._looks_at = -TRIM_SECONDS
        asyncio.get_running_loop().run_in_executor(None, _trim)
        if self._waiting or not is_last:
            self._look_later(is_last=not self._waiting)


class _Waiter(NamedTuple):
    """A request that waits for more."""

    lease: Lease
    size_bytes: int
    served: asyncio.Future[None]
    leads: asyncio.Future[None]
    """Done once it is the first of its caller."""


def _lead(queue: deque[_Waiter]) -> None:
    """Notifies the first of the requests of a caller that it is the first."""
    if queue and not queue[0].leads.done():
        queue[0].leads.set_result(None)


class Lease:
    """Bytes of one request, returned when it is closed, once. A context manager."""

    def __init__(self, budget: MemoryBudget, caller: str) -> None:
        self._budget = budget
        self.caller = caller
        self.size_bytes = 0
        self.small_bytes = 0
        """The same while the request is a small one; set by the budget."""

    def grow(self, size_bytes: int) -> None:
        """Takes more bytes. Raises `TooManyRequests`."""
        if not self._budget.has_room(self, size_bytes):
            raise self._full(size_bytes)
        self.add(size_bytes)

    async def acquire(self, size_bytes: int, wait_seconds: float = WAIT_SECONDS) -> None:
        """Has this number of bytes instead of those so far. Waits for more, behind the caller's other large requests.

        Raises `TooManyRequests`, with the bytes so far, if the wait takes longer than `wait_seconds`, or would never
        end.
        """
        more = size_bytes - self.size_bytes
        if more <= 0:
            self.add(more)
            return
        budget = self._budget
        if budget.passes(self, more) or (not budget.has_waiting(self.caller) and budget.has_room(self, more)):
            self.add(more)
            return
        if size_bytes > LONE_FRACTION * budget.capacity_bytes:
            raise self._full(size_bytes)
        try:
            await budget.wait(self, more, wait_seconds)
        except TimeoutError:
            raise self._full(size_bytes) from None

    def close(self) -> None:
        """Returns the bytes. Idempotent."""
        self.add(-self.size_bytes)

    def add(self, size_bytes: int) -> None:
        """Counts bytes that there is room for, or returns some if negative."""
        if size_bytes:
            self.size_bytes += size_bytes
            self._budget.add(self, size_bytes)

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
    """The budget of this process, whose freed memory is kept up to this budget, until requests take little again."""
    budget = MemoryBudget(budget_bytes())
    _keep_freed(budget.capacity_bytes)
    return budget


def budget_bytes(reserved_bytes: int = 0) -> int:
    """The budget of a process that needs `reserved_bytes` for something else, as a node for its pool."""
    return max((memory_limit() - reserved_bytes) // LIMIT_FRACTION, MIN_BYTES)


def memory_limit(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes that this process may use: the least of the host's, its cgroups' and its own limit (`ulimit -d`)."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limits += (cgroup.limit_bytes for cgroup in memory_cgroups(proc, cgroup_root) if cgroup.limit_bytes is not None)
    own, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return min(limits if own == resource.RLIM_INFINITY else [*limits, own])


def _count(counts: dict[str, int], caller: str, change: int) -> None:
    """Adds to a caller's count, of which zeros are not kept."""
    if count := counts.get(caller, 0) + change:
        counts[caller] = count
    else:
        counts.pop(caller, None)


def _keep_freed(size_bytes: int) -> None:
    """Has the allocator keep freed memory up to this size, where it has such a setting.

    Threads, those of gRPC among them, share one arena: `malloc_trim` does not return the free end of any other.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_MMAP_THRESHOLD, REUSED_BYTES)
        set_option(_M_TRIM_THRESHOLD, min(size_bytes, (1 << 31) - 1))


def _trim() -> None:
    """Returns free memory of the allocator to the system, where that has such a call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCgroup:
    """One cgroup, by its files."""

    directory: Path
    limit: str
    usage: str
    reclaimable: str
    """The line of memory.stat with the file pages that the kernel reclaims first."""

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that its processes may use together; None: it has no limit."""
        try:
            most = int((self.directory / self.limit).read_text())
        except (OSError, ValueError):  # there is no such file, or it says `max`
            return None
        return most if most < _UNLIMITED else None

    @property
    def free_bytes(self) -> int | None:
        """The bytes that are left under the limit; None: it has none."""
        most = self.limit_bytes
        if most is None:
            return None
        try:
            used = int((self.directory / self.usage).read_text())
            stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        except OSError:
            return None
        return most - used + int(stat.get(self.reclaimable, 0))


def memory_cgroups(proc: Path = PROC, root: Path = CGROUP_ROOT) -> Iterator[MemoryCgroup]:
    """All cgroups of this process, from its own to the root.

    In a container the path in /proc may not be mounted; the root of the mount is then the container's cgroup.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.lstrip("/")
        for directory in (own, *own.parents):
            yield MemoryCgroup(directory=directory, limit=files[0], usage=files[1], reclaimable=files[2])
            if directory == top:
                break
