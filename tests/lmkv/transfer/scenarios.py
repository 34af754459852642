"""What every channel must do, whatever happens to the other end: run by `test_contract`, in a process per channel."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkv.errors import ChannelUnsupported, Unreachable, WrongInstance
from lmkv.transfer import Channel, Copy
from tests.lmkv.transfer.ends import (
    GRANT_ID,
    MIB,
    SIZE,
    TLS_VARIABLE,
    Memory,
    Owner,
    Stops,
    content,
    eventually,
    whole,
)
from tests.support.certificates import issue
from tests.waiting import WAIT_SECONDS, rests, wait_until

PATIENCE = 600.0
"""What a read may take that must end long before: `WAIT_SECONDS` at the most."""


class Reader:
    """A channel that reads, its memory, and owners to read from."""

    def __init__(self, kind: str, folder: Path, memory: Memory, channel: Channel) -> None:
        self.kind = kind
        self.folder = folder
        self.memory = memory
        self.channel = channel

    def owner(self, name: str = "owner:1", seed: int = 1) -> Owner:
        """An owner in a process of its own."""
        return Owner(self.kind, name, self.folder, seed)

    async def read(self, owner: Owner, timeout_seconds: float = PATIENCE, size_bytes: int = SIZE) -> Stops:
        """Reads all of its memory, or the beginning; how often that stopped."""
        stops = Stops()
        await self.channel.read(owner.name, whole(owner, self.memory, size_bytes), timeout_seconds, stops, GRANT_ID)
        assert stops.count == 1
        return stops

    async def begin(
        self, owner: Owner, timeout_seconds: float = PATIENCE
    ) -> tuple[asyncio.Task[list[int] | None], Stops]:
        """A read of all its memory, under way: the first bytes have landed."""
        stops = Stops()
        self.memory.words[:] = 0
        reading = asyncio.create_task(
            self.channel.read(owner.name, whole(owner, self.memory), timeout_seconds, stops, GRANT_ID)
        )
        while not self.memory.words[0] and not reading.done():  # noqa: ASYNC110 # memory has no change events
            await asyncio.sleep(0)
        return reading, stops

    async def ends_soundly(self, reading: asyncio.Task[list[int] | None], stops: Stops, seed: int = 1) -> bool:
        """Whether a read succeeded; asserts that its bytes are right then, and that nothing lands after either end."""
        try:
            await reading
            succeeded = True
            assert np.array_equal(self.memory.words, content(seed))
        except Unreachable:
            succeeded = False
        await eventually(stops.happened)
        self.memory.words[:] = 0
        await asyncio.sleep(0.1)
        assert not self.memory.words.any()
        assert stops.count == 1
        return succeeded


Scenario = Callable[[Reader], Coroutine[Any, Any, None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(what: Scenario) -> Scenario:
    """Has every channel go through it."""
    SCENARIOS[what.__name__] = what
    return what


@scenario
async def runs_of_any_size_arrive_bit_for_bit(reader: Reader) -> None:
    rng = random.Random(7)
    source = content(1).view(np.uint8)
    expected = np.zeros(SIZE, np.uint8)
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        copies, at = [], 0
        sizes = [0, 1, 4096, 7 * MIB, 33 * MIB, *(rng.choice([1, 3, 63, 64, 513, 4096, 10_007]) for _ in range(5000))]
        for size in sizes:
            start = rng.randrange(SIZE - size)
            expected[at : at + size] = source[start : start + size]
            copies.append(
                Copy(remote_address=owner.address + start, local_address=reader.memory.address + at, size_bytes=size)
            )
            at += size + rng.randrange(3)
        stops = Stops()
        await reader.channel.read(owner.name, copies, PATIENCE, stops, GRANT_ID)
        assert stops.count == 1
        assert np.array_equal(reader.memory.words.view(np.uint8), expected)


@scenario
async def a_read_of_nothing_is_over_at_once(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        stops = Stops()
        await reader.channel.read(owner.name, [], PATIENCE, stops, GRANT_ID)
        assert stops.count == 1


@scenario
async def many_reads_from_two_peers_at_a_time_do_not_mix(reader: Reader) -> None:
    with reader.owner("owner:1", 1) as first, reader.owner("owner:2", 2) as second:
        for owner in (first, second):
            await reader.channel.add_peer(owner.name, owner.metadata)
        step, expected = MIB // 2, np.zeros(SIZE // 8, np.uint64)
        contents = {seed: content(seed) for seed in (1, 2)}
        async with asyncio.TaskGroup() as group:
            for number in range(64):
                owner, seed = ((first, 1), (second, 2))[number % 2]
                at, start = number * step, (63 - number) * step
                expected[at // 8 : (at + step) // 8] = contents[seed][start // 8 : (start + step) // 8]
                copy = Copy(
                    remote_address=owner.address + start, local_address=reader.memory.address + at, size_bytes=step
                )
                group.create_task(reader.channel.read(owner.name, [copy], PATIENCE, Stops(), GRANT_ID))
        assert np.array_equal(reader.memory.words, expected)


@scenario
async def a_peer_killed_between_reads_is_unreachable_at_once_and_its_successor_is_not(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.read(owner)
        owner.signal(signal.SIGKILL)
        stops = Stops()
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(Unreachable):
                await reader.channel.read(owner.name, whole(owner, reader.memory), PATIENCE, stops, GRANT_ID)
            with pytest.raises((Unreachable, ChannelUnsupported)):
                await reader.channel.add_peer(owner.name, owner.metadata)
        await eventually(stops.happened)
    await restarted(reader, owner)


async def restarted(reader: Reader, before: Owner) -> None:
    """The peer's next epoch is read, and the one before is forgotten."""
    with reader.owner("owner:9", seed=9) as owner:
        with pytest.raises(WrongInstance):
            await reader.channel.add_peer(before.name, owner.metadata)
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.channel.remove_peer(before.name)
        await reader.read(owner)
        assert np.array_equal(reader.memory.words, content(9))
        with pytest.raises(Unreachable):
            await reader.channel.read(before.name, whole(before, reader.memory), PATIENCE, Stops(), GRANT_ID)


@scenario
async def a_peer_killed_while_it_is_read_from_is_noticed(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        reading, stops = await reader.begin(owner)
        owner.signal(signal.SIGKILL)
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.ends_soundly(reading, stops)
    await restarted(reader, owner)


@scenario
async def a_frozen_peer_costs_the_deadline_at_most(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        reading, stops = await reader.begin(owner, 0.5)
        owner.signal(signal.SIGSTOP)
        ended, _ = await asyncio.wait([reading], timeout=WAIT_SECONDS)
        assert ended, "its deadline was half a second"
        await asyncio.sleep(0.1)
        if not stops.happened():  # its bytes are still on their way, and no clock ends that
            assert isinstance(reading.exception(), Unreachable)
        owner.signal(signal.SIGCONT)
        await reader.ends_soundly(reading, stops)
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.read(owner)
        assert np.array_equal(reader.memory.words, content(1))


@scenario
async def a_peer_that_closes_its_channel_while_it_is_read_from_is_noticed(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        reading, stops = await reader.begin(owner, 5.0)
        await asyncio.to_thread(owner.ask, "close")
        await reader.ends_soundly(reading, stops)
        await fails_or_is_right(reader, owner)


async def fails_or_is_right(reader: Reader, owner: Owner) -> None:
    """NIXL revokes nothing: what its owner no longer offers can be read all the same."""
    stops = Stops()
    reading = asyncio.create_task(reader.channel.read(owner.name, whole(owner, reader.memory), 1.0, stops, GRANT_ID))
    succeeded = await reader.ends_soundly(reading, stops)
    assert not succeeded or reader.kind == "nixl"


@scenario
async def bytes_outside_of_either_memory_are_refused_and_nothing_is_written(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        remote, local = owner.address, reader.memory.address
        outside = [
            (remote + SIZE, local, 8),
            (remote + SIZE - 8, local, 16),
            (remote - 8, local, 16),
            (0, local, 8),
            (remote, local + SIZE - 8, 16),
            (remote, local - 8, 16),
            (remote, local, SIZE + 1),
            (remote, local, -8),
        ]
        for remote_address, local_address, size_bytes in outside:
            good = Copy(remote_address=remote, local_address=local, size_bytes=MIB)
            bad = Copy(remote_address=remote_address, local_address=local_address, size_bytes=size_bytes)
            stops = Stops()
            with pytest.raises(Unreachable):
                await reader.channel.read(owner.name, [good, bad], 5.0, stops, GRANT_ID)
            assert stops.count == 1
            assert not reader.memory.words.any()
        await reader.read(owner)
        assert np.array_equal(reader.memory.words, content(1))


@scenario
async def an_owner_that_sends_the_bytes_itself_sends_only_what_a_live_grant_of_the_reader_covers(
    reader: Reader,
) -> None:
    if reader.kind not in ("tcp", "ucx"):
        return  # their readers read by themselves: docs/operate/security.md
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        part, another, ended = "b" * 32, "c" * 32, "d" * 32
        owner.ask(f"grant {part} {4 * MIB} {MIB}")
        owner.ask(f"grant-another {another}")
        owner.ask(f"grant {ended} 0 {MIB}")
        owner.ask(f"end {ended}")

        async def read(grant_id: str, start: int, size_bytes: int) -> None:
            copies = [
                Copy(remote_address=owner.address + at, local_address=reader.memory.address + at, size_bytes=size_bytes)
                for at in (4 * MIB, start)
            ]
            stops = Stops()
            try:
                await reader.channel.read(owner.name, copies, PATIENCE, stops, grant_id)
            finally:
                await eventually(stops.happened)

        refused = [
            ("", 4 * MIB, 8),
            ("e" * 32, 4 * MIB, 8),
            (another, 4 * MIB, 8),
            (ended, 0, 8),
            (part, 0, 8),
            (part, 4 * MIB - 8, 16),
            (part, 5 * MIB - 8, 16),
            (part, 5 * MIB, 8),
        ]
        for grant_id, start, size_bytes in refused:
            with pytest.raises(Unreachable):
                await read(grant_id, start, size_bytes)
            assert not reader.memory.words.any()
        assert owner.ask("refused") == len(refused)
        await read(part, 5 * MIB - 8, 8)
        assert np.count_nonzero(reader.memory.words) == 2
        assert owner.ask("refused") == len(refused)


@scenario
async def a_cancelled_read_stops_soon_and_does_not_disturb_the_next(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        for under_way in (False, True, True):
            stops = Stops()
            if under_way:
                reading, stops = await reader.begin(owner)
            else:
                reading = asyncio.create_task(
                    reader.channel.read(owner.name, whole(owner, reader.memory), PATIENCE, stops, GRANT_ID)
                )
                await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await eventually(stops.happened)
            await reader.read(owner)
            assert np.array_equal(reader.memory.words, content(1))
            assert stops.count == 1


@scenario
async def closing_ends_reads_that_run(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        reading, stops = await reader.begin(owner)
        owner.signal(signal.SIGSTOP)
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.channel.aclose()
            await reader.ends_soundly(reading, stops)


@scenario
async def damaged_or_foreign_metadata_is_refused_and_does_no_harm(reader: Reader) -> None:
    with reader.owner() as owner:
        for damaged in (b"", b"hello", owner.metadata[:-1], owner.metadata[:40], b"x" + owner.metadata):
            with pytest.raises(ChannelUnsupported):
                await reader.channel.add_peer(owner.name, damaged)
        with pytest.raises(WrongInstance):
            await reader.channel.add_peer("another:1", owner.metadata)
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.read(owner)
        assert np.array_equal(reader.memory.words, content(1))


@scenario
async def who_was_never_added_or_is_removed_is_not_read_from(reader: Reader) -> None:
    with reader.owner() as owner:
        for _ in range(2):
            stops = Stops()
            with pytest.raises(Unreachable):
                await reader.channel.read(owner.name, whole(owner, reader.memory), PATIENCE, stops, GRANT_ID)
            assert stops.count == 1
            await reader.channel.add_peer(owner.name, owner.metadata)
            await reader.channel.remove_peer(owner.name)
            await reader.channel.remove_peer(owner.name)


@scenario
async def an_idle_channel_costs_no_cpu(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        reader.channel.serve(True)
        await reader.read(owner)
        reader.channel.serve(False)
        rested = partial(rests, time.process_time, 1.0)
        await asyncio.to_thread(wait_until, rested, "the channel rests")


@scenario
async def a_closed_channel_refuses_and_closing_twice_is_safe(reader: Reader) -> None:
    with reader.owner() as owner:
        await reader.channel.add_peer(owner.name, owner.metadata)
        await reader.channel.aclose()
        await reader.channel.aclose()
        stops = Stops()
        with pytest.raises(Unreachable):
            await reader.channel.read(owner.name, whole(owner, reader.memory), PATIENCE, stops, GRANT_ID)
        assert stops.count == 1


@asynccontextmanager
async def fresh_reader(kind: str) -> AsyncIterator[Reader]:
    """A reader; afterwards its sockets' folder must be empty."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        memory = Memory()
        channel = await memory.open(kind, f"reader:{time.time_ns()}", Path(folder))
        try:
            yield Reader(kind, Path(folder), memory, channel)
        finally:
            await channel.aclose()
            memory.close()
        killed = {"owner:1.sock"}  # an owner that was killed leaves its socket to its successor
        assert set(os.listdir(folder)) <= killed  # noqa: PTH208


def belongings(kind: str) -> Counter[str]:
    """What a process has that a channel may have taken: threads, mappings of pools, and files."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate()]
    found = Counter(name for name in threads if not name.startswith("asyncio_"))  # the loop's own pool grows and stays
    found["mappings"] = Path("/proc/self/maps").read_text().count("lmkv-pool")
    if kind == "ucx":  # it keeps sockets of reads that were interrupted: a known limit, docs/contribute/transfer.md
        return found
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder that is being listed
            found[str(link.readlink()).partition(":")[0]] += 1
    return found


async def run(kind: str, name: str) -> None:
    """One scenario; raises what it raises, and `AssertionError` if anything is left behind."""
    before = belongings(kind)
    async with fresh_reader(kind) as reader:
        await SCENARIOS[name](reader)
    del reader
    try:
        await eventually(lambda: belongings(kind) <= before)
    except AssertionError:
        raise AssertionError(f"left behind: {belongings(kind) - before}") from None


async def warm_up(kind: str) -> None:
    """Has the channel's library loaded: what it takes once, it may keep."""
    async with fresh_reader(kind):
        pass


def serve(kind: str) -> None:
    """Main function of the process: runs the requested scenarios and returns the result of each."""
    with tempfile.TemporaryDirectory() as folder:
        if TLS_VARIABLE in os.environ:
            issue(Path(folder))
            os.environ[TLS_VARIABLE] = folder  # the processes of owners inherit it
        _serve(kind)


def _serve(kind: str) -> None:
    asyncio.run(warm_up(kind))
    for line in sys.stdin:
        try:
            asyncio.run(run(kind, line.strip()))
            problem = ""
        except BaseException:
            problem = traceback.format_exc()
        print("\n" + json.dumps({"problem": problem}), flush=True)
