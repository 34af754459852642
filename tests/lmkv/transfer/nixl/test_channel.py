"""Behaviour of the NIXL channel only: quarantine behind frozen peers, failed starts, unclean exits."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import ConfigError, Unreachable
from lmkv.transfer import ChannelEnd, Copy, open_channel
from lmkv.transfer.nixl.api import BATCH_BYTES, descriptor_batches
from tests.chaos.clock import Clock, compiled
from tests.lmkv.transfer.ends import (
    GRANT_ID,
    MIB,
    Memory,
    Owner,
    Stops,
    content,
    environment,
    eventually,
    in_new_process,
    whole,
)
from tests.waiting import WAIT_SECONDS


async def frozen_owner() -> None:
    memory = Memory()
    channel = await memory.open("nixl", "reader:1")
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:1", Path(folder)) as owner:
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory, 8 * MIB), 60.0, Stops(), GRANT_ID)
        owner.signal(signal.SIGSTOP)
        stops = Stops()
        with pytest.raises(Unreachable) as raised:
            await channel.read(owner.name, whole(owner, memory), 0.3, stops, GRANT_ID)
        assert raised.value.metadata["quarantined"] == "True"
        refused = Stops()
        with pytest.raises(Unreachable, match="earlier read"):
            async with asyncio.timeout(WAIT_SECONDS):
                await channel.read(owner.name, whole(owner, memory), 600.0, refused, GRANT_ID)
        assert refused.count == 1
        await asyncio.sleep(0.3)
        assert stops.count == 0  # its bytes are still on their way
        owner.signal(signal.SIGCONT)
        await eventually(stops.happened)
        await channel.add_peer(owner.name, owner.metadata)
        await channel.read(owner.name, whole(owner, memory), 5.0, Stops(), GRANT_ID)
        assert np.array_equal(memory.words, content(1))
        assert stops.count == 1
        await channel.aclose()


def test_memory_is_quarantined_until_a_frozen_peer_is_proven_to_have_stopped() -> None:
    in_new_process(frozen_owner, UCX_TLS="tcp")


async def failing_reads() -> None:
    memory = Memory()
    channel: Any = await memory.open("nixl", "reader:1")
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:1", Path(folder)) as owner:
        await channel.add_peer(owner.name, owner.metadata)
        agent, errors = channel._thread._agent, channel._thread._errors
        release, released = agent.release_xfer_handle, []

        def count(handle: Any) -> None:
            released.append(handle)
            release(handle)

        def fail(_: Any) -> str:
            raise errors[0]("as the test demands")

        agent.release_xfer_handle, agent.check_xfer_state = count, fail
        agent.transfer = lambda _handle: "PROC"
        stops = Stops()
        with pytest.raises(Unreachable, match="as the test demands"):
            await channel.read(owner.name, whole(owner, memory, 8 * MIB), 60.0, stops, GRANT_ID)
        await eventually(stops.happened)
        assert len(released) == 1
        await channel.aclose()


def test_a_read_that_fails_releases_what_nixl_keeps_for_it() -> None:
    in_new_process(failing_reads, UCX_TLS="tcp")


async def closed_while_it_reads() -> None:
    memory = Memory()
    channel: Any = await memory.open("nixl", "reader:1")
    with tempfile.TemporaryDirectory() as folder, Owner("nixl", "owner:1", Path(folder)) as owner:
        await channel.add_peer(owner.name, owner.metadata)
        agent = channel._thread._agent
        release, order = agent.release_xfer_handle, []

        def released(handle: Any) -> None:
            order.append("released")
            release(handle)

        agent.release_xfer_handle, agent.check_xfer_state = released, lambda _handle: "PROC"
        agent.transfer = lambda _handle: "PROC"
        reading = asyncio.create_task(
            channel.read(owner.name, whole(owner, memory, 8 * MIB), 60.0, lambda: order.append("stopped"), GRANT_ID)
        )
        await eventually(lambda: channel._thread._reads)
        await channel.aclose()
        with pytest.raises(Unreachable, match="closed"):
            await reading
        assert order == ["released", "stopped"], "NIXL's handle keeps the connections, by which bytes still arrive"


def test_a_channel_that_closes_releases_a_read_before_its_memory_may_be_used() -> None:
    in_new_process(closed_while_it_reads, UCX_TLS="tcp")


async def failed_thread() -> None:
    memory = Memory(MIB)
    channel: Any = await memory.open("nixl", "reader:1")
    channel._thread.submit(lambda: 1 / 0)
    await eventually(lambda: not channel._thread._thread.is_alive())
    with pytest.raises(Unreachable, match="closed"):
        await channel.remove_peer("owner:1")
    await channel.aclose()


def test_a_channel_whose_thread_has_failed_is_closed_and_keeps_no_one_waiting() -> None:
    in_new_process(failed_thread, UCX_TLS="tcp")


async def test_a_backend_that_is_not_there_is_refused_by_key() -> None:
    memory = Memory(MIB)
    with pytest.raises(ConfigError, match="nixl_backends: PIGEON"):
        await open_channel("nixl", ChannelEnd(name="reader:1", pool=memory.pool, nixl_backends=("PIGEON",)))
    memory.close()


async def opened_and_closed() -> None:
    channel = await Memory(MIB).open("nixl", "reader:1")
    await channel.aclose()


def test_nixl_starts_while_the_wall_clock_is_set_back_again_and_again(tmp_path: Path) -> None:
    library = compiled(tmp_path)
    assert library is not None, "cc is missing: install gcc"
    clock, has_ended = Clock(library, tmp_path / "clock"), threading.Event()

    def set_back() -> None:
        for hours in itertools.count():
            clock.jump(-3600.0 * hours)
            if has_ended.wait(0.005):
                return

    setting_back = threading.Thread(target=set_back)
    setting_back.start()
    try:
        in_new_process(opened_and_closed, UCX_TLS="tcp", **clock.environment)
    finally:
        has_ended.set()
        setting_back.join()


def test_a_process_that_forgets_to_close_ends_cleanly_beside_a_dead_peer_and_prints_nothing(tmp_path: Path) -> None:
    program = f"""
import asyncio, atexit, logging, os, pathlib, signal, sys
from lmkv.errors import Unreachable
from tests.lmkv.transfer.ends import Memory, Owner

async def main():
    logging.basicConfig(level=logging.WARNING)
    memory = Memory(1 << 20)
    channel = await memory.open("nixl", "reader:1")
    owner = Owner("nixl", "owner:1", pathlib.Path({str(tmp_path)!r}), size_bytes=1 << 20)
    await channel.add_peer(owner.name, owner.metadata)
    owner.signal(signal.SIGKILL)
    await channel.remove_peer(owner.name)
    try:
        await channel.add_peer(owner.name, owner.metadata)
    except Unreachable:
        if os.fork() == 0:
            atexit._run_exitfuncs()
            os._exit(0)
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
        timeout=200,
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
