"""Places that callers share (connections, requests, watches, registrations), with a share per caller. Pure.

A holder of a place waits until its first message is complete: a hello, a request with its body. Holders that wait lose
their place to others, the oldest first, so that clients that send nothing displace only each other. Holders that do
not wait keep their place. One caller alone gets at most a share of the places, and less while other callers hold some:
the places that it may hold are a constant fraction of those that are free. So callers that take all that they can
leave places to the next caller, whatever their number.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

from lmkv.errors import Full, TooManyRequests

SPARE_FRACTION = 8
"""`most_of` leaves this fraction of the places (1/8) to other callers."""
_IPV6_CLIENT_BITS = 64
"""An IPv6 client controls at least a network of this prefix length."""

Holder = TypeVar("Holder", bound=Hashable)

requester: ContextVar[str] = ContextVar("lmkv_requester", default="")
"""The engine for which this task works, where no caller of an RPC requested the work. Tasks inherit it."""


class Places(Generic[Holder]):
    """Admits at most `limit` holders, of which one caller has at most `share`. Not thread-safe."""

    def __init__(self, name: str, limit: int, share: int) -> None:
        """`name` is what errors call the places, in the plural."""
        self._name = name
        self.limit = limit
        self.share = min(share, limit)
        self._callers: dict[Holder, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, dict[Holder, None]] = {}
        """The holders that wait, by caller, the longest first."""
        self._waiting_count = 0

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[Holder]:
        return iter(self._callers)

    def __contains__(self, holder: object) -> bool:
        return holder in self._callers

    def count(self, caller: str) -> int:
        """The places that a caller holds."""
        return self._counts[caller]

    def is_waiting(self, holder: Holder) -> bool:
        """Whether a holder would lose its place to another one."""
        return holder in self._waiting.get(self._callers.get(holder, ""), ())

    def take(self, holder: Holder, caller: str, *, waits: bool = False) -> Holder | None:
        """Takes a place. Returns the holder that has lost its place to this one, which the caller has to end.

        Raises as `check`. Idempotent.
        """
        if holder in self._callers:
            return None
        self.check(caller, waits=waits)
        lost = None
        if self._counts[caller] >= self.share:
            lost = self._oldest(caller)
        elif len(self) >= self.limit:
            lost = self._oldest(max(self._waiting, key=lambda one: len(self._waiting[one])))
        if lost is not None:
            self.release(lost)
        self._callers[holder] = caller
        self._counts[caller] += 1
        if waits:
            self._wait(holder, caller)
        return lost

    def check(self, caller: str, *, waits: bool = False) -> None:
        """Raises `Full` if all holders keep their places, and `TooManyRequests` if the caller has its share."""
        kept = len(self) - self._waiting_count
        own = self._counts[caller] - len(self._waiting.get(caller, ()))
        free = self.limit - kept
        if not free:
            raise Full(f"all {self.limit} {self._name} are taken; retry later", retry_seconds=1.0)
        has_share = own < self.share and (waits or own * (self.limit - self.share) < self.share * free)
        if not has_share:
            raise TooManyRequests(
                f"this caller has {own} of {self.limit} {self._name}, its share of what is free; retry later",
                retry_seconds=1.0,
            )

    def wait(self, holder: Holder) -> None:
        """A holder waits for a first message (again), last of all that wait."""
        self.settle(holder)
        if (caller := self._callers.get(holder)) is not None:
            self._wait(holder, caller)

    def settle(self, holder: Holder) -> None:
        """The first message of a holder is complete: it keeps its place until `release`. Idempotent."""
        caller = self._callers.get(holder)
        waiting = self._waiting.get(caller, {}) if caller is not None else {}
        if caller is not None and holder in waiting:
            del waiting[holder]
            self._waiting_count -= 1
            if not waiting:
                del self._waiting[caller]

    def release(self, holder: Holder) -> None:
        """Frees the place of a holder. Idempotent."""
        self.settle(holder)
        caller = self._callers.pop(holder, None)
        if caller is not None:
            self._counts[caller] -= 1
            if not self._counts[caller]:
                del self._counts[caller]

    def _wait(self, holder: Holder, caller: str) -> None:
        self._waiting.setdefault(caller, {})[holder] = None
        self._waiting_count += 1

    def _oldest(self, caller: str) -> Holder:
        return next(iter(self._waiting[caller]))


def most_of(limit: int) -> int:
    """A share that leaves a fraction of the places to others; everything, if there are few."""
    return limit - limit // SPARE_FRACTION


def client_of(address: str) -> str:
    """The unit that limits count as one client: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_CLIENT_BITS), strict=False))
