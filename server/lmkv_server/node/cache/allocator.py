"""The allocator of the host tier: tracks the free bytes of the pool. Pure."""

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
    taken best fit, from the end of their run: they gather at the other end, and leave few holes among full chunks.

    Every call takes a logarithm of the number of runs, and the moves of machine words in a sorted list; a size larger
    than all before takes as long as there are runs.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = self._free_bytes = self._end = size_bytes // ALIGNMENT * ALIGNMENT
        self._sizes: dict[int, int] = {}
        """Size of each run, by its start."""
        self._starts: list[int] = []
        """Starts of all runs, in order."""
        self._by_size: list[tuple[int, int]] = []
        """Size and start of each run, in order."""
        self._large: list[int] = []
        """Starts of the runs that the largest size fits into, in order."""
        self._largest = 0
        """The largest size that was taken."""
        if self._end:
            self._add(0, self._end)

    @property
    def size_bytes(self) -> int:
        """Bytes of all runs, free or taken."""
        return self._size_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the free runs."""
        return self._free_bytes

    @property
    def longest_bytes(self) -> int:
        """Bytes of the longest free run."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, size_bytes: int) -> int | None:
        """Takes a run of at least `size_bytes` and returns its offset; None if no run is long enough."""
        size = align(size_bytes)
        if size > self.longest_bytes:
            return None
        if size > self._largest:
            self._largest = size
            self._large = [start for start in self._starts if self._sizes[start] >= size]
        if size == self._largest:
            offset = self._large[0]
        else:
            shortest, _ = self._by_size[bisect_left(self._by_size, (size, 0))]
            _, start = self._by_size[bisect_left(self._by_size, (shortest + 1, 0)) - 1]
            offset = start + shortest - size
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
        self._remove(start)
        if before:
            self._add(start, before)
        if behind:
            self._add(offset + size, behind)
        self._free_bytes -= size
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
        before = self._starts[at - 1] if at else None
        if offset + size in self._sizes:  # merge with the run behind
            size += self._remove(offset + size)
        if before is not None and before + self._sizes[before] == offset:  # and with the one in front
            size += self._remove(before)
            offset = before
        self._add(offset, size)

    def end_at(self, offset: int) -> None:
        """Removes the bytes behind `offset`: free bytes at once, others when they are freed."""
        self._end = min(self._end, offset // ALIGNMENT * ALIGNMENT)
        for start in [start for start in self._starts if start + self._sizes[start] > self._end]:
            size = self._remove(start)
            self._free_bytes -= size
            self.give(start, size)

    def _add(self, start: int, size: int) -> None:
        """Adds a run that touches no other."""
        self._sizes[start] = size
        insort(self._starts, start)
        insort(self._by_size, (size, start))
        if size >= self._largest:
            insort(self._large, start)

    def _remove(self, start: int) -> int:
        """Removes a run; returns its size."""
        size = self._sizes.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        if size >= self._largest:
            del self._large[bisect_left(self._large, start)]
        return size

    def check(self) -> None:
        """Asserts that runs are sorted, apart from each other, inside the pool, and add up."""
        assert self._starts == sorted(self._sizes)
        assert self._by_size == sorted((size, start) for start, size in self._sizes.items())
        assert self._large == [start for start in self._starts if self._sizes[start] >= self._largest]
        assert sum(self._sizes.values()) == self.free_bytes
        end = -1
        for start in self._starts:
            assert start > end, "runs overlap or were not merged"
            end = start + self._sizes[start]
        assert end <= self._end
