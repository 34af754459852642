"""Which bytes of the pool are free. Pure; used by the host tier."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

ALIGNMENT = 4096
"""Extents start at multiples of this many bytes: whole pages, which suits every copy engine."""


def align(size_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class FreeList:
    """The free runs of `[0, size_bytes)`; neighbouring runs are always merged.

    The largest size is taken first fit, which keeps the low, already touched end of the pool busy: chunks of one spec
    have one size, so that holes fit the next chunk exactly. Smaller sizes, of partial chunks or of other specs, are
    taken best fit, from the end of their run: they gather at the other end, and leave no holes among full chunks.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = self._free_bytes = self._end = size_bytes // ALIGNMENT * ALIGNMENT
        self._sizes: dict[int, int] = {0: self._end} if self._end else {}
        self._starts: list[int] = list(self._sizes)
        self._largest = 0
        """The largest size that was taken."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all runs, free or taken."""
        return self._size_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the free runs."""
        return self._free_bytes

    def take(self, size_bytes: int) -> int | None:
        """Takes a run of at least `size_bytes` and returns its offset; None if no run is long enough."""
        size = align(size_bytes)
        if size < self._largest:
            return self._take_best(size)
        for start in self._starts:
            if self._sizes[start] >= size:
                self._remove(start, rest=size)
                self._free_bytes -= size
                self._largest = size
                return start
        return None

    def _take_best(self, size: int) -> int | None:
        """Takes the end of the shortest run that is long enough, of equal ones the last."""
        best = None
        for start in self._starts:
            if self._sizes[start] >= size and (best is None or self._sizes[start] <= self._sizes[best]):
                best = start
        if best is None:
            return None
        offset = best + self._sizes[best] - size
        self.take_at(offset, size)
        return offset

    def take_at(self, offset: int, size_bytes: int) -> bool:
        """Takes the run of `size_bytes` at `offset`; False if a part of it is taken."""
        size = align(size_bytes)
        at = bisect_right(self._starts, offset) - 1
        if offset % ALIGNMENT or size <= 0 or at < 0:
            return False
        start = self._starts[at]
        before, behind = offset - start, start + self._sizes[start] - offset - size
        if behind < 0:
            return False
        self._remove(start, rest=before + size)
        self._free_bytes -= before + size
        self.give(start, before)
        return True

    def give(self, offset: int, size_bytes: int) -> None:
        """Makes a taken run, or a part of one, free again."""
        size = align(size_bytes)
        beyond = min(size, max(0, offset + size - self._end))
        self._size_bytes -= beyond
        size -= beyond
        if not size:
            return
        self._free_bytes += size
        at = bisect_left(self._starts, offset)
        if at < len(self._starts) and self._starts[at] == offset + size:  # merge with the run behind
            size += self._sizes.pop(self._starts.pop(at))
        if at and (before := self._starts[at - 1]) + self._sizes[before] == offset:  # and with the one in front
            self._sizes[before] += size
            return
        insort(self._starts, offset)
        self._sizes[offset] = size

    def end_at(self, offset: int) -> None:
        """Removes the bytes behind `offset`: free ones at once, taken ones when they are freed."""
        self._end = min(self._end, offset // ALIGNMENT * ALIGNMENT)
        for start in [start for start in self._starts if start + self._sizes[start] > self._end]:
            size = self._sizes[start]
            self._remove(start, rest=size)
            self._free_bytes -= size
            self.give(start, size)

    def _remove(self, start: int, rest: int) -> None:
        """Takes the first `rest` bytes out of the run at `start`."""
        size = self._sizes.pop(start)
        at = bisect_left(self._starts, start)
        if size == rest:
            del self._starts[at]
        else:
            self._starts[at] = start + rest
            self._sizes[start + rest] = size - rest

    def check(self) -> None:
        """Asserts that runs are sorted, apart from each other, inside the pool, and add up."""
        assert self._starts == sorted(self._sizes)
        assert sum(self._sizes.values()) == self.free_bytes
        end = -1
        for start in self._starts:
            assert start > end, "runs overlap or were not merged"
            end = start + self._sizes[start]
        assert end <= self._end
