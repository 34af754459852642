"""Chunks that fetch orders have brought to a node, or found there, and when. Pure. Used by `OrderRunner`.

A move drops a chunk at its source because the destination has it. If another coordinator moves the same chunk the
other way at that time, each of the two moves relies on the copy that the other one drops. So a node counts its fetches,
a move names the count that the source reported before the destination fetched, and chunks that arrived later stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from lmkv.keys import ChunkKey

MAX_ARRIVALS = 65_536
"""Chunks whose arrival is remembered; of all others it is assumed that they arrived with the last forgotten one."""


class Arrivals:
    """The last arrival of each chunk, as a serial number that increases, also across restarts of the node."""

    def __init__(self, serial: int) -> None:
        """`serial` must be greater than those of an earlier process: a time in nanoseconds."""
        self._serial = serial
        self._serials: OrderedDict[ChunkKey, int] = OrderedDict()  # oldest first
        self._forgotten = 0

    @property
    def serial(self) -> int:
        """That of the last arrival."""
        return self._serial

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are here now because of one fetch order."""
        arrived = list(keys)
        if not arrived:
            return
        self._serial += 1
        for key in arrived:
            self._serials[key] = self._serial
            self._serials.move_to_end(key)
        while len(self._serials) > MAX_ARRIVALS:
            _, self._forgotten = self._serials.popitem(last=False)

    def since(self, serial: int, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Those of the chunks that have arrived after a serial number; all if that is too long ago to know."""
        if serial < self._forgotten:
            return set(keys)
        return {key for key in keys if self._serials.get(key, 0) > serial}

    def check(self) -> None:
        """Asserts that the bound and the order are kept."""
        serials = list(self._serials.values())
        assert serials == sorted(serials)
        assert len(serials) <= MAX_ARRIVALS
        assert all(self._forgotten <= one <= self.serial for one in serials)
