"""A warm start without a node: stores during it, a stop during it, and invalid records."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmkv.pool.file import PoolFile
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import ALIGNMENT
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.ledger import STAMP, Ledger, LedgerRecord, ledger_bytes
from lmkv_server.node.cache.warm_start import WarmStart
from tests.server.node.cases import chunk_key
from tests.server.node.disk_parts import until
from tests.server.node.warm_parts import verified

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
        """Stores chunks whose every byte is their number."""
        for number in numbers:
            reserved = self.tier.reserve(ALIGNMENT)
            assert reserved
            self.file.pool.buffer[reserved.offset : reserved.offset + ALIGNMENT] = bytes([number]) * ALIGNMENT
            assert self.tier.commit(
                reserved.offset,
                key=chunk_key(number),
                fingerprint=bytes(16),
                size_bytes=ALIGNMENT,
                checksum=checksum(self.file.pool.buffer, reserved.offset, ALIGNMENT),
                token_count=1,
            )

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
            generation=0,
            tier=life.tier,
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
