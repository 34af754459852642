"""An instance with a million chunks dies: what others notice of it, and when its memory is back."""

from __future__ import annotations

import asyncio
import time

import grpc

from benchmarks.coordinator.fleets import SimulatedInstance, join_all
from benchmarks.coordinator.layouts import random_keys, resident_bytes
from benchmarks.coordinator.lookups import Questions, RawLookupStream
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import CoordinatorProcess

CHUNK_COUNT = 1_000_000
"""Of the instance that dies, and of those that live together."""
SURVIVOR_COUNT = 10
BEAT_SECONDS = 0.5
LEASE_SECONDS = 3.0
WATCH_SECONDS = 3.0
"""How long lookups are watched after the death."""
KEPT_SHARE = 0.25
"""Of the memory that an instance took, the allocator may keep this much: buffers of the messages that reported it."""
TIMEOUT_SECONDS = 30.0


async def measure(run: BenchmarkRun) -> None:
    """Adds the rows: the longest lookup from the death on, and the time until its memory is returned."""
    victim = SimulatedInstance(0, random_keys(0, CHUNK_COUNT))
    survivors = [
        SimulatedInstance(number, random_keys(number, CHUNK_COUNT // SURVIVOR_COUNT))
        for number in range(1, SURVIVOR_COUNT + 1)
    ]
    with CoordinatorProcess(run.logs, arguments=("--lease-ttl", str(LEASE_SECONDS))) as coordinator:
        async with rpc.open_channel(coordinator.address) as channel, asyncio.TaskGroup() as tasks:
            await join_all(survivors, channel)
            beats = [tasks.create_task(_beat(survivor)) for survivor in survivors]
            await _measure_death(run, channel, coordinator.pid, victim)
            for beat in beats:
                beat.cancel()


async def _beat(instance: SimulatedInstance) -> None:
    while True:
        await instance.beat()
        await asyncio.sleep(BEAT_SECONDS)


async def _measure_death(run: BenchmarkRun, channel: grpc.aio.Channel, pid: int, victim: SimulatedInstance) -> None:
    before = resident_bytes(pid)
    await victim.join(channel)
    taken = resident_bytes(pid) - before
    questions = Questions([victim])
    alive: list[float] = []
    dead: list[float] = []
    died = reclaimed = 0.0
    deadline = time.perf_counter() + TIMEOUT_SECONDS
    async with RawLookupStream(channel) as line:
        while not died or time.perf_counter() < died + WATCH_SECONDS:
            started = time.perf_counter()
            found = (await line.ask(questions.ask(40))).holders
            now = time.perf_counter()
            (dead if died or not found else alive).append(now - started)
            if found and died:
                raise LmkvError("a lookup found an instance that had been gone")
            if not found:
                died = died or now
                if not reclaimed and resident_bytes(pid) < before + taken * KEPT_SHARE:
                    reclaimed = now
            if now > deadline:
                raise LmkvError("an instance that does not report lives on")
    if not reclaimed:
        left = resident_bytes(pid) - before
        raise LmkvError(f"{left} of {taken} bytes were left {WATCH_SECONDS:.0f} s after an instance died")
    run.add(compare("death_pause_ms", 1e3 * max(dead), "ms", "longest lookup before", 1e3 * max(alive)))
    run.add(Row(name="death_reclaim_s", value=reclaimed - died, unit="s"))
