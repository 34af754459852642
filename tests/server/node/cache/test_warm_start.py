"""The ledger of a pool: what it says after any end, against a naive list, and what it does not believe."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.pool.file import PoolFile
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.warm_start import (
    MIN_SLOTS,
    POOL_BYTES_PER_SLOT,
    SLOT_BYTES,
    STAMP,
    Ledger,
    LedgerRecord,
    WarmStart,
    ledger_bytes,
)
from tests.server.node.cases import chunk_key, put
from tests.server.node.disk_parts import until
from tests.server.node.warm_parts import verified

SLOTS = 6


def table(slots: int = SLOTS) -> memoryview:
    return memoryview(bytearray(slots * SLOT_BYTES + 10))


def chunk(number: int, at: int, *, parent: int | None = None) -> Chunk:
    """A chunk at a page of the pool; all its numbers are different ones."""
    return Chunk(
        key=chunk_key(number),
        fingerprint=bytes([number % 256]) * 16,
        offset=at * ALIGNMENT,
        size_bytes=8 + number,
        checksum=(1 << 64) - 1 - number,
        token_count=1 + number,
        parent=None if parent is None else chunk_key(parent),
    )


def described(one: Chunk | LedgerRecord) -> tuple[object, ...]:
    return one.key, one.parent, one.fingerprint, one.offset, one.size_bytes, one.checksum, one.token_count


def found(memory: memoryview) -> list[tuple[object, ...]]:
    """What a later life reads."""
    return [described(record) for record in Ledger(memory).records]


class LedgerAgainstList(RuleBasedStateMachine):
    """The model keeps the chunks in the order in which they came; a later life may take over at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.ledger = Ledger(self.table)
        self.chunks: list[Chunk] = []
        self.number = 0

    @precondition(lambda self: len(self.chunks) < SLOTS)
    @rule(data=st.data(), has_parent=st.booleans())
    def put(self, data: st.DataObject, has_parent: bool) -> None:
        taken = {one.offset // ALIGNMENT for one in self.chunks}
        self.number += 1
        at = data.draw(st.sampled_from(sorted(set(range(SLOTS + 2)) - taken)))
        one = chunk(self.number, at, parent=self.number - 1 if has_parent else None)
        self.ledger.put(one)
        self.chunks.append(one)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.chunks))
        self.ledger.drop(one.offset)
        self.chunks.remove(one)

    @rule()
    def live_again(self) -> None:
        self.ledger = Ledger(self.table)
        for one in self.chunks:
            self.ledger.put(one)  # as it is found again

    @invariant()
    def a_later_life_reads_just_what_is_there(self) -> None:
        assert found(self.table) == [described(one) for one in self.chunks]
        assert self.ledger.recorded_count == len(self.chunks)
        assert self.ledger.unrecorded_count == 0


TestLedgerAgainstList = LedgerAgainstList.TestCase
TestLedgerAgainstList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_there_is_no_slot_for_is_counted_and_does_not_outlive_the_node() -> None:
    memory = table(2)
    ledger = Ledger(memory)
    for number in range(3):
        ledger.put(chunk(number, number))
    ledger.drop(chunk(2, 2).offset)
    assert ledger.unrecorded_count == 1
    assert found(memory) == [described(chunk(number, number)) for number in range(2)]
    ledger.drop(0)
    ledger.put(chunk(3, 3))
    assert found(memory) == [described(chunk(1, 1)), described(chunk(3, 3))]


@pytest.mark.parametrize("written", range(0, SLOT_BYTES, 7))
def test_a_record_that_was_written_in_part_is_none_and_one_dropped_in_part_is_gone(written: int) -> None:
    memory = table()
    ledger = Ledger(memory)
    ledger.put(chunk(1, 1))
    whole = bytes(memory)
    ledger.put(chunk(2, 2))
    torn = memoryview(bytearray(memory))
    torn[SLOT_BYTES + written : 2 * SLOT_BYTES] = bytes(SLOT_BYTES - written)
    assert found(torn) == [described(chunk(1, 1))]
    torn[:] = memory
    torn[SLOT_BYTES : SLOT_BYTES + written] = bytes(written)
    assert found(torn) == [described(one) for one in (chunk(1, 1), chunk(2, 2))[: 2 - bool(written)]]
    ledger.drop(chunk(2, 2).offset)
    assert bytes(memory) == whole


def test_no_flipped_bit_is_believed() -> None:
    memory = table(1)
    Ledger(memory).put(chunk(1, 1, parent=0))
    choose = random.Random(1)
    for _ in range(200):
        damaged = memoryview(bytearray(memory))
        damaged[choose.randrange(SLOT_BYTES)] ^= 1 << choose.randrange(8)
        assert found(damaged) == []


def test_a_slot_that_holds_nonsense_is_used_again() -> None:
    memory = table(2)
    memory[:] = random.Random(2).randbytes(len(memory))
    ledger = Ledger(memory)
    assert ledger.records == []
    for number in range(2):
        ledger.put(chunk(number, number))
    assert len(found(memory)) == 2
    assert ledger.unrecorded_count == 0


@pytest.mark.parametrize("serial", [(1 << 63) - 1, 1 << 63, (1 << 64) - 2])
def test_records_follow_one_with_a_high_serial(serial: int) -> None:
    memory = _with_serial(serial)
    ledger = Ledger(memory)
    ledger.put(chunk(2, 1))
    assert found(memory) == [described(chunk(1, 0)), described(chunk(2, 1))]
    assert ledger.unrecorded_count == 0


def test_no_record_follows_one_with_the_highest_serial() -> None:
    memory = _with_serial((1 << 64) - 1)
    ledger = Ledger(memory)
    ledger.put(chunk(2, 1))
    assert found(memory) == [described(chunk(1, 0))]
    assert ledger.unrecorded_count == 1


def _with_serial(serial: int) -> memoryview:
    """A table with a record of `chunk(1, 0)`."""
    memory = table()
    Ledger(memory).put(chunk(1, 0))
    memory[:8] = serial.to_bytes(8, "little")
    memory[SLOT_BYTES - 4 : SLOT_BYTES] = crc32(memory[: SLOT_BYTES - 4]).to_bytes(4, "little")
    return memory


def test_of_two_records_for_one_place_one_counts() -> None:
    memory = table()
    Ledger(memory).put(chunk(1, 1))
    memory[SLOT_BYTES : 2 * SLOT_BYTES] = memory[:SLOT_BYTES]
    ledger = Ledger(memory)
    assert len(ledger.records) == 1
    ledger.drop(ALIGNMENT)
    ledger.put(chunk(2, 1))
    assert described(chunk(2, 1)) in found(memory)


def test_a_ledger_costs_less_than_a_thousandth_of_its_pool() -> None:
    assert ledger_bytes(100 << 30) < 100 << 20
    assert ledger_bytes(1 << 20) == MIN_SLOTS * SLOT_BYTES < 512 << 10
    assert ledger_bytes(5 << 30) // SLOT_BYTES == (5 << 30) // POOL_BYTES_PER_SLOT


def test_far_slots_are_read_too() -> None:
    memory = table(5000)
    first = Ledger(memory)
    for number in range(4500):
        first.put(chunk(number, number))
    for number in range(3000):
        first.drop(number * ALIGNMENT)
    ledger = Ledger(memory)
    assert [record.token_count - 1 for record in ledger.records] == list(range(3000, 4500))
    for number in range(3500):
        ledger.put(chunk(9000 + number, 9000 + number))
    assert (ledger.recorded_count, ledger.unrecorded_count) == (5000, 0)


POOL_BYTES = 16 * ALIGNMENT
GATE_SECONDS = 60.0


class GatedStart(WarmStart):
    """One that sums nothing before its gate is open."""

    def __init__(self, file: PoolFile, ledger: Ledger, tier: HostTier) -> None:
        super().__init__(file, ledger, tier)
        self.gate = threading.Event()
        self.waits = threading.Event()

    def _sum(self, batch: Sequence[LedgerRecord]) -> list[int]:
        self.waits.set()
        assert self.gate.wait(GATE_SECONDS)
        return super()._sum(batch)


class Life:
    """A node's pool, tier and ledger, without the node."""

    def __init__(self, path: Path) -> None:
        self.file = PoolFile.open(path, POOL_BYTES, ledger_bytes(POOL_BYTES), stamp=STAMP)
        self.ledger = Ledger(self.file.table)
        self.tier = HostTier(POOL_BYTES, self.ledger)

    def store(self, *numbers: int) -> None:
        for number in numbers:
            put(self.tier, chunk_key(number), ALIGNMENT, pool=self.file.pool, content=bytes([number]) * ALIGNMENT)

    def held(self) -> list[int]:
        """Numbers of the chunks that can be found, by their bytes."""
        numbers = []
        for chunk in self.tier:
            content = bytes(self.file.pool.buffer[chunk.offset : chunk.offset + ALIGNMENT])
            assert content == content[:1] * ALIGNMENT
            assert chunk.key == chunk_key(content[0])
            numbers.append(content[0])
        return numbers

    def recorded(self) -> list[bytes]:
        """Keys that the next life will read."""
        return [record.key for record in Ledger(self.file.table).records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a life that has stored four chunks."""
    path = tmp_path / "pool"
    life = Life(path)
    life.store(0, 1, 2, 3)
    life.file.close()
    return path


async def test_a_chunk_that_is_stored_again_meanwhile_stays_and_the_old_one_is_removed(path: Path) -> None:
    life = Life(path)
    async with GatedStart(life.file, life.ledger, life.tier) as warm:
        await until(warm.waits.is_set)
        assert (life.held(), warm.stats().waiting_chunks) == ([], 4)
        life.store(2, 9)
        warm.gate.set()
        await verified(warm)
        assert sorted(life.held()) == [0, 1, 2, 3, 9]
        assert (warm.stats().found_chunks, warm.stats().damaged_chunks) == (3, 0)
        assert life.tier.used_bytes == 5 * ALIGNMENT
        assert sorted(life.recorded()) == [chunk_key(number) for number in (0, 1, 2, 3, 9)]
        life.tier.check()
    life.file.close()


async def test_what_a_life_had_no_time_to_verify_the_next_one_finds(path: Path) -> None:
    for _ in range(2):
        life = Life(path)
        async with GatedStart(life.file, life.ledger, life.tier) as warm:
            await until(warm.waits.is_set)
            assert warm.stats().waiting_chunks == 4
            threading.Timer(0.05, warm.gate.set).start()
        await warm.aclose()
        assert life.held() == []
        life.file.close()
    life = Life(path)
    async with WarmStart(life.file, life.ledger, life.tier) as last:
        await verified(last)
        assert life.held() == [0, 1, 2, 3]
    life.file.close()


async def test_nothing_that_waits_to_be_verified_is_overwritten(path: Path) -> None:
    life = Life(path)
    async with GatedStart(life.file, life.ledger, life.tier) as warm:
        await until(warm.waits.is_set)
        life.store(*range(10, 22))
        assert life.tier.reserved_count == 4
        life.store(22)
        assert 10 not in life.held(), "it went for the last one"
        warm.gate.set()
        await verified(warm)
        assert set(life.held()) >= {0, 1, 2, 3, 22}
        life.tier.check()
    life.file.close()


async def test_records_that_overlap_or_lie_outside_are_dropped(path: Path) -> None:
    life = Life(path)
    for offset, size_bytes in ((POOL_BYTES, 8), (8 * ALIGNMENT + 8, 8), (3 * ALIGNMENT - 8, 16), (2 << 60, 1 << 62)):
        nonsense = Chunk(
            key=chunk_key(99),
            fingerprint=bytes(16),
            offset=offset,
            size_bytes=size_bytes,
            checksum=0,
            token_count=1,
        )
        life.ledger.put(nonsense)
    life.file.close()
    life = Life(path)
    async with WarmStart(life.file, life.ledger, life.tier) as warm:
        await verified(warm)
        assert life.held() == [0, 1, 2, 3]
        assert (warm.stats().found_chunks, warm.stats().damaged_chunks) == (4, 4)
        assert len(life.recorded()) == 4
    life.file.close()
