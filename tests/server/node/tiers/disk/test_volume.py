"""The index of one folder against a naive model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.tiers.disk.folder import DiskChunk
from lmkv_server.node.tiers.disk.volume import DiskIndex
from tests.server.node.cases import chunk_key, chunk_keys

PAGES = 10
KEY_COUNT = 8
sizes = st.integers(1, 4 * ALIGNMENT)


def file_bytes(size_bytes: int) -> int:
    """The length of the file of a chunk; those of odd size are encrypted."""
    return disk_chunk(0, size_bytes).file_bytes


def disk_chunk(number: int, size_bytes: int = ALIGNMENT, parent: int | None = None) -> DiskChunk:
    return DiskChunk(
        key=chunk_key(number),
        parent=None if parent is None else chunk_key(parent),
        fingerprint=bytes(16),
        token_count=1,
        size_bytes=size_bytes,
        checksum=number,
        key_id=b"key id 8" if size_bytes % 2 else b"",
        serial=number,
    )


class DiskIndexAgainstModel(RuleBasedStateMachine):
    """The model keeps a list of chunks, least recently used first, and one of what is reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex(PAGES * ALIGNMENT)
        self.held: list[DiskChunk] = []
        self.reserved: list[int] = []
        self.limit = PAGES * ALIGNMENT

    @property
    def used(self) -> int:
        return sum(chunk.file_bytes for chunk in self.held) + sum(map(file_bytes, self.reserved))

    @rule(size_bytes=sizes)
    def reserve(self, size_bytes: int) -> None:
        gone = self.index.reserve(file_bytes(size_bytes))
        if sum(map(file_bytes, self.reserved)) + file_bytes(size_bytes) > self.limit:
            assert gone is None
            return
        self.reserved.append(size_bytes)
        expected = []
        while self.used > self.limit:
            expected.append(self.held.pop(0))
        assert gone == expected

    @precondition(lambda self: self.reserved)
    @rule(number=st.integers(0, KEY_COUNT - 1))
    def admit(self, number: int) -> None:
        if any(chunk.key == chunk_key(number) for chunk in self.held):
            return
        chunk = disk_chunk(number, self.reserved.pop(0))
        self.held.append(chunk)
        self.index.admit(chunk)

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        self.index.give_back(file_bytes(self.reserved.pop()))

    @rule(numbers=st.lists(st.integers(0, KEY_COUNT - 1), unique=True))
    def use(self, numbers: list[int]) -> None:
        self.index.use(chunk_keys(*numbers))
        used = [chunk for number in numbers for chunk in self.held if chunk.key == chunk_key(number)]
        self.held = [chunk for chunk in self.held if chunk not in used] + used[::-1]

    @rule(number=st.integers(0, KEY_COUNT - 1))
    def remove(self, number: int) -> None:
        chunk = next((chunk for chunk in self.held if chunk.key == chunk_key(number)), None)
        assert self.index.remove(chunk_key(number)) is chunk
        if chunk:
            self.held.remove(chunk)

    @rule()
    def full(self) -> None:
        self.limit = min(self.limit, sum(chunk.file_bytes for chunk in self.held))
        self.index.full()

    @rule()
    def empty_again(self) -> None:
        self.limit = self.index.limit_bytes = self.index.capacity_bytes

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert {chunk.key for chunk in self.index} == {chunk.key for chunk in self.held}
        assert len(self.index) == len(self.held)
        assert all(self.index.get(chunk.key) is chunk for chunk in self.held)
        assert (self.index.used_bytes, self.index.limit_bytes) == (self.used, self.limit)


TestDiskIndexAgainstModel = DiskIndexAgainstModel.TestCase
TestDiskIndexAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_no_chunk_goes_before_those_that_come_after_it() -> None:
    index = DiskIndex(3 * ALIGNMENT)
    index.fill([disk_chunk(0), disk_chunk(1, parent=0), disk_chunk(2, parent=1)])
    assert [index.reserve(ALIGNMENT) for _ in range(3)] == [
        [disk_chunk(2, parent=1)],
        [disk_chunk(1, parent=0)],
        [disk_chunk(0)],
    ]
    assert index.reserve(1) is None


def test_the_contents_of_a_folder_are_adopted_once_and_up_to_its_limit() -> None:
    index = DiskIndex(3 * ALIGNMENT)
    again = disk_chunk(1, 2 * ALIGNMENT)
    assert index.fill([disk_chunk(0), disk_chunk(1), disk_chunk(2), again]) == [disk_chunk(1), disk_chunk(0)]
    assert list(index) == [disk_chunk(2), again]
    index.check()


def test_a_superseded_chunk_leaves_first_and_an_unknown_one_changes_nothing() -> None:
    index = DiskIndex(3 * file_bytes(ALIGNMENT))
    for number in range(3):
        assert index.reserve(file_bytes(ALIGNMENT)) == []
        index.admit(disk_chunk(number))
    index.supersede(chunk_key(1))
    index.supersede(chunk_key(7))
    gone = index.reserve(file_bytes(ALIGNMENT))
    assert [chunk.key for chunk in gone or []] == [chunk_key(1)]
