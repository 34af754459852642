"""The free list against a naive map of pages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_server.node.cache.allocator import ALIGNMENT, FreeList, align
from tests.server.node.cache.page_runs import first_page

PAGES = 24


class FreeListAgainstPages(RuleBasedStateMachine):
    """Every page of the pool is free or taken; the list must agree, and pick the run that its rule names."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeList(PAGES * ALIGNMENT + 1)
        self.is_free = [True] * PAGES
        self.end = PAGES
        self.largest = 0
        self.taken: list[tuple[int, int]] = []
        """First page and page count of what is taken."""

    @rule(size_bytes=st.integers(1, 6 * ALIGNMENT))
    def take(self, size_bytes: int) -> None:
        count = -(-size_bytes // ALIGNMENT)
        expected = first_page(self.is_free, count, self.largest)
        offset = self.free.take(size_bytes)
        assert offset == (None if expected is None else expected * ALIGNMENT)
        if expected is not None:
            self.largest = max(self.largest, count)
            self.taken.append((expected, count))
            self.is_free[expected : expected + count] = [False] * count

    @rule(page=st.integers(0, PAGES + 1), size_bytes=st.integers(1, 6 * ALIGNMENT), beside=st.sampled_from([0, 0, 8]))
    def take_at(self, page: int, size_bytes: int, beside: int) -> None:
        count = -(-size_bytes // ALIGNMENT)
        expected = not beside and page + count <= PAGES and all(self.is_free[page : page + count])
        assert self.free.take_at(page * ALIGNMENT + beside, size_bytes) is expected
        if expected:
            self.taken.append((page, count))
            self.is_free[page : page + count] = [False] * count

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_all_or_the_tail(self, data: st.DataObject) -> None:
        start, count = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        kept = data.draw(st.integers(0, count - 1))
        if kept:
            self.taken.append((start, kept))
        self.free.give(
            (start + kept) * ALIGNMENT, (count - kept) * ALIGNMENT - data.draw(st.integers(0, ALIGNMENT - 1))
        )
        self.is_free[start + kept : start + count] = [page < self.end for page in range(start + kept, start + count)]

    @precondition(lambda self: self.end > PAGES // 2)
    @rule(pages=st.integers(1, PAGES + 2))
    def end_at(self, pages: int) -> None:
        self.free.end_at(pages * ALIGNMENT + 5)
        self.end = min(self.end, pages)
        self.is_free[self.end :] = [False] * (PAGES - self.end)

    @invariant()
    def adds_up(self) -> None:
        self.free.check()
        assert self.free.free_bytes == sum(self.is_free) * ALIGNMENT
        runs = "".join("x" if is_free else " " for is_free in self.is_free).split()
        assert self.free.longest_bytes == max(map(len, runs), default=0) * ALIGNMENT
        assert self.free.size_bytes == (sum(self.is_free) + sum(count for _, count in self.taken)) * ALIGNMENT


TestFreeListAgainstPages = FreeListAgainstPages.TestCase
TestFreeListAgainstPages.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("size_bytes", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_sizes_are_rounded_up_to_whole_pages(size_bytes: int, aligned: int) -> None:
    assert align(size_bytes) == aligned


def test_a_pool_below_one_page_has_no_room() -> None:
    free = FreeList(ALIGNMENT - 1)
    assert free.size_bytes == 0
    assert free.take(1) is None
    free.check()


def test_the_last_part_of_a_page_is_never_handed_out() -> None:
    free = FreeList(2 * ALIGNMENT + 100)
    assert free.take(2 * ALIGNMENT) == 0
    assert free.take(1) is None


def test_giving_nothing_changes_nothing() -> None:
    free = FreeList(ALIGNMENT)
    free.take(ALIGNMENT)
    free.give(ALIGNMENT, 0)
    free.check()
    assert free.free_bytes == 0


def test_freed_neighbours_become_one_run() -> None:
    free = FreeList(3 * ALIGNMENT)
    for _ in range(3):
        free.take(ALIGNMENT)
    for page in (0, 2, 1):
        free.give(page * ALIGNMENT, ALIGNMENT)
        free.check()
    assert free.take(3 * ALIGNMENT) == 0


def test_nothing_cannot_be_taken_at_a_place() -> None:
    free = FreeList(2 * ALIGNMENT)
    assert not free.take_at(ALIGNMENT, 0)
    free.check()
    assert free.longest_bytes == 2 * ALIGNMENT, "the run is not divided"
