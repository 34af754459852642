"""The NIXL channel, between real processes."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import ChannelUnsupported, ConfigError, Unreachable, WrongInstance
from lmkv.transfer import Channel, Copy, open_channel
from lmkv.transfer.nixl_api import BATCH_BYTES, descriptor_batches
from tests.lmkv.transfer_ends import MIB, Memory, Owner, Stops, content, environment, eventually, in_new_process

SIZE = 128 * MIB


@pytest.fixture
async def reader() -> AsyncIterator[tuple[Channel, Memory]]:
    memory = Memory(SIZE)
    channel = memory.open(f"reader:{time.time_ns()}")
    yield channel, memory
    await channel.aclose()


def whole(owner: Owner, memory: Memory, size_bytes: int = SIZE) -> list[Copy]:
    """All of the owner's memory, in runs of 8 MiB."""
    step = 8 * MIB
    return [
        Copy(remote_address=owner.address + at, local_address=memory.address + at, size_bytes=step)
        for at in range(0, size_bytes, step)
    ]


async def read_scattered(channel: Channel, memory: Memory, owner: Owner) -> None:
    """Reads runs of all lengths from all over, and compares every word of the memory."""
    rng = random.Random(7)
    source = content(1, SIZE)
    expected = np.zeros(SIZE // 8, np.uint64)
    copies, at = [], 0
    while True:
        word_count = rng.choice([1, 512, 513, 4096, 100_000, 1_000_000, 9_000_000])
        if (at + word_count) * 8 > SIZE:
            break
        start = rng.randrange(SIZE // 8 - word_count)
        expected[at : at + word_count] = source[start : start + word_count]
        copies.append(
            Copy(
                remote_address=owner.address + 8 * start,
                local_address=memory.address + 8 * at,
                size_bytes=8 * word_count,
            )
        )
        at += word_count + rng.randrange(3)
    assert at * 8 > 64 * MIB
    stops = Stops()
    await channel.read(owner.name, copies, 20.0, stops)
    assert stops.count == 1
    assert np.array_equal(memory.words, expected)


async def test_scattered_runs_arrive_bit_for_bit(reader: tuple[Channel, Memory]) -> None:
    channel, memory = reader
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await read_scattered(channel, memory, owner)


async def scattered_over_tcp() -> None:
    memory = Memory(SIZE)
    channel = memory.open("reader:1")
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await read_scattered(channel, memory, owner)
        await channel.aclose()


def test_scattered_runs_arrive_bit_for_bit_over_tcp() -> None:
    in_new_process(scattered_over_tcp, UCX_TLS="tcp")


async def test_a_peer_killed_between_reads_is_unreachable_at_once_and_its_successor_is_not(
    reader: tuple[Channel, Memory],
) -> None:
    channel, memory = reader
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        owner.signal(signal.SIGKILL)
        stops, started = Stops(), time.monotonic()
        with pytest.raises(Unreachable):
            await channel.read(owner.name, whole(owner, memory), 5.0, stops)
        with pytest.raises(Unreachable):
            await channel.add_peer(owner.name, owner.metadata)
        assert time.monotonic() - started < 1.0
        await eventually(stops.happened)
        assert stops.count == 1
    with Owner("owner:2", seed=2) as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        assert np.array_equal(memory.words, content(2, SIZE))


async def killed_while_reading() -> None:
    memory = Memory(SIZE)
    channel = memory.open("reader:1")
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory, 8 * MIB), 5.0, Stops())
        stops = Stops()
        reading = asyncio.create_task(channel.read(owner.name, whole(owner, memory), 20.0, stops))
        await asyncio.sleep(0.02)
        owner.signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(Unreachable):
            await reading
        await eventually(stops.happened, 1.0)
        assert time.monotonic() - started < 1.0
    with Owner("owner:2", seed=2) as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        assert np.array_equal(memory.words, content(2, SIZE))
    assert stops.count == 1
    await channel.aclose()


def test_a_peer_killed_while_it_is_read_from_is_noticed_within_a_second() -> None:
    in_new_process(killed_while_reading, UCX_TLS="tcp")


async def frozen_owner() -> None:
    memory = Memory(SIZE)
    channel = memory.open("reader:1")
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory, 8 * MIB), 5.0, Stops())
        owner.signal(signal.SIGSTOP)
        stops, started = Stops(), time.monotonic()
        with pytest.raises(Unreachable) as raised:
            await channel.read(owner.name, whole(owner, memory), 0.3, stops)
        assert 0.3 <= time.monotonic() - started < 0.5
        assert raised.value.metadata["quarantined"] == "True"
        started, refused = time.monotonic(), Stops()
        with pytest.raises(Unreachable, match="earlier read"):
            await channel.read(owner.name, whole(owner, memory), 5.0, refused)
        assert time.monotonic() - started < 0.2
        assert refused.count == 1
        await asyncio.sleep(0.3)
        assert stops.count == 0  # its bytes are still on their way
        owner.signal(signal.SIGCONT)
        await eventually(stops.happened)
        memory.words[:] = 0
        await asyncio.sleep(0.3)
        assert not memory.words.any()  # nothing lands any more
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        assert np.array_equal(memory.words, content(1, SIZE))
        assert stops.count == 1
        await channel.aclose()


def test_a_frozen_peer_costs_the_deadline_and_memory_is_quarantined_until_it_is_proven_stopped() -> None:
    in_new_process(frozen_owner, UCX_TLS="tcp")


async def closed_while_frozen() -> None:
    memory = Memory(SIZE)
    channel = memory.open("reader:1")
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory, 8 * MIB), 5.0, Stops())
        owner.signal(signal.SIGSTOP)
        stops = Stops()
        reading = asyncio.create_task(channel.read(owner.name, whole(owner, memory), 20.0, stops))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await channel.aclose()
        with pytest.raises(Unreachable):
            await reading
        assert stops.count == 1
        assert time.monotonic() - started < 1.0
        owner.signal(signal.SIGKILL)


def test_closing_ends_reads_that_hang() -> None:
    in_new_process(closed_while_frozen, UCX_TLS="tcp")


async def cancelled_reads() -> None:
    memory = Memory(SIZE)
    channel = memory.open("reader:1")
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory, 8 * MIB), 5.0, Stops())
        for delay in (0.0, 0.001, 0.01, 0.05):
            stops = Stops()
            reading = asyncio.create_task(channel.read(owner.name, whole(owner, memory), 5.0, stops))
            await asyncio.sleep(delay)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await channel.read(owner.name, whole(owner, memory, 8 * MIB), 5.0, Stops())
            if delay:
                await eventually(stops.happened)
            await asyncio.sleep(0.01)
            assert stops.count == (1 if delay else stops.count)
        await channel.aclose()


def test_a_cancelled_read_ends_soon_and_does_not_disturb_the_next() -> None:
    in_new_process(cancelled_reads, UCX_TLS="tcp")


async def test_an_idle_channel_costs_no_cpu(reader: tuple[Channel, Memory]) -> None:
    channel, memory = reader
    with Owner("owner:1") as owner:
        await channel.add_peer(owner.name, owner.metadata)
        with channel.serving():
            await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.02


async def test_damaged_metadata_is_refused_and_does_no_harm(reader: tuple[Channel, Memory]) -> None:
    channel, memory = reader
    with Owner("owner:1") as owner:
        for damaged in (b"", b"hello", owner.metadata[:-1], owner.metadata[:100], b"x" + owner.metadata):
            with pytest.raises(ChannelUnsupported):
                await channel.add_peer(owner.name, damaged)
        with pytest.raises(WrongInstance):
            await channel.add_peer("another:1", owner.metadata)
        await channel.add_peer(owner.name, owner.metadata)
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops())
        assert np.array_equal(memory.words, content(1, SIZE))


async def test_a_read_that_cannot_be_is_unreachable_and_stops_at_once(reader: tuple[Channel, Memory]) -> None:
    channel, memory = reader
    with Owner("owner:1") as owner:
        for known in (False, True):
            if known:
                await channel.add_peer(owner.name, owner.metadata)
            stops = Stops()
            copy = Copy(remote_address=owner.address + SIZE, local_address=memory.address, size_bytes=8)
            with pytest.raises(Unreachable):
                await channel.read(owner.name, [copy], 1.0, stops)
            await eventually(stops.happened, 1.0)
        await channel.add_peer(owner.name, owner.metadata)
        await channel.remove_peer(owner.name)
        await channel.remove_peer(owner.name)
        with pytest.raises(Unreachable):
            await channel.read(owner.name, whole(owner, memory), 1.0, Stops())


async def test_a_closed_channel_refuses_and_closing_twice_is_safe() -> None:
    memory = Memory(MIB)
    channel = memory.open("reader:1")
    await channel.aclose()
    await channel.aclose()
    stops = Stops()
    with pytest.raises(Unreachable):
        await channel.read("owner:1", [], 1.0, stops)
    assert stops.count == 1
    with pytest.raises(Unreachable):
        await channel.remove_peer("owner:1")


def test_what_cannot_start_says_which_key_to_change() -> None:
    with pytest.raises(ConfigError, match="transfer_channel: 'smoke'"):
        open_channel("smoke", "reader:1", 0, 0, [])
    memory = Memory(MIB)
    with pytest.raises(ConfigError, match="nixl_backends: PIGEON"):
        open_channel("nixl", "reader:1", memory.address, memory.size_bytes, ["PIGEON"])


def test_without_nixl_the_error_names_the_package_to_install() -> None:
    program = """
import sys
from lmkv.errors import ConfigError
from lmkv.transfer import open_channel
from lmkv.transfer.nixl_api import PACKAGES
for package in PACKAGES:
    sys.modules[package] = None
try:
    open_channel("nixl", "reader:1", 4096, 4096, ["UCX"])
except ConfigError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert "transfer_channel" in done.stderr
    assert "lmkv[nixl]" in done.stderr


def test_a_process_that_forgets_to_close_ends_cleanly_beside_a_dead_peer_and_prints_nothing() -> None:
    program = """
import asyncio, logging, os, signal, sys
from lmkv.errors import Unreachable
from tests.lmkv.transfer_ends import Memory, Owner

async def main():
    logging.basicConfig(level=logging.WARNING)
    memory = Memory(1 << 20)
    channel = memory.open("reader:1")
    owner = Owner("owner:1", size_bytes=1 << 20)
    await channel.add_peer(owner.name, owner.metadata)
    owner.signal(signal.SIGKILL)
    await channel.remove_peer(owner.name)
    try:
        await channel.add_peer(owner.name, owner.metadata)
    except Unreachable:
        if os.fork() == 0:
            sys.exit(0)
        assert os.wait()[1] == 0
        print("gone")
    owner.close()

if __name__ == "__main__":
    assert logging.raiseExceptions
    asyncio.run(main())
    assert logging.raiseExceptions
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gone\n"


RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), max_size=12)


@given(RUNS)
def test_batches_cover_exactly_what_is_to_be_copied(runs: list[tuple[int, int]]) -> None:
    copies, local = [], 1 << 40
    for gap, size in runs:
        local += gap * MIB
        copies.append(Copy(remote_address=2 * local, local_address=local, size_bytes=size * 3 * MIB))
        local += size * 3 * MIB
    covered: list[tuple[int, int, int]] = []
    for to, source in descriptor_batches(copies):
        assert (to[:, 1] == source[:, 1]).all()
        assert 0 < to[:, 1].sum() <= BATCH_BYTES
        assert not to[:, 2].any()
        for (address, size, _), (remote, _, _) in zip(to.tolist(), source.tolist(), strict=True):
            if covered and covered[-1][0] + covered[-1][2] == address and covered[-1][1] + covered[-1][2] == remote:
                before = covered.pop()
                covered.append((before[0], before[1], before[2] + size))
            else:
                covered.append((address, remote, size))
    assert covered == [(c.local_address, c.remote_address, c.size_bytes) for c in copies if c.size_bytes]
