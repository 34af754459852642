"""The judgement of a soak finds leaks, and accepts runs without, in series like those of real runs."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import subprocess
import sys

import pytest

from lmkv.pool.pool import Pool
from tests.soak.latencies import HOST
from tests.soak.report import Report, Sample
from tests.soak.resources import Usage, add_usage, peers_bytes

SECONDS = 3600.0
MIB = 1 << 20
LEVELS_MIB = {"node-1": 100.0, "coordinator-1": 65.0, "store": 8.0}

WASTE = """
import sys, threading
kept = []
for line in sys.stdin:
    kept.append(bytes([1]) * (4 << 20))
    kept.append(open("/dev/null"))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(flush=True)
"""


def run(seed: int, *, leak_bytes_per_second: float = 0.0, fds_per_hour: float = 0.0, slowdown: float = 0.0) -> Report:
    """An hour of samples: memory settles in the first minutes, an allocator takes and returns parts of a MiB, and the
    load of the host changes. `slowdown` is the part by which lookups take longer in the end.
    """
    chance = random.Random(seed)
    report = Report(run=f"seed {seed}", seconds=SECONDS)
    drift = dict.fromkeys(LEVELS_MIB, 0.0)
    for at in range(5, round(SECONDS) + 5, 5):
        usage = {}
        for process, level in LEVELS_MIB.items():
            drift[process] = 0.8 * drift[process] + chance.gauss(0, 0.1)
            settled = level * (1 - 0.1 * 0.5 ** (at / 120)) + drift[process]
            usage[process] = Usage(
                memory_bytes=round(settled * MIB + leak_bytes_per_second * at),
                fds=40 + round(chance.gauss(0, 1) + fds_per_hour * at / SECONDS),
                threads=30 + round(chance.gauss(0, 1)),
                tasks=60 + round(chance.gauss(0, 5)),
            )
        host = (1.5 if at > SECONDS / 2 else 1.0) * (1 + abs(chance.gauss(0, 0.1)))
        lookup = 3.0 * host * (1 + slowdown * at / SECONDS) * (1 + abs(chance.gauss(0, 0.1)))
        latencies = {HOST: {"p50": 0.2 * host, "p99": 2 * host}, "node lookup": {"p50": lookup, "p99": 10 * lookup}}
        report.samples.append(Sample(seconds=float(at), usage=usage, latencies=latencies))
    return report


def risen(report: Report) -> set[str]:
    return {trend.name for trend in report.trends() if trend.has_risen}


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_leaks_nothing_passes_although_the_host_becomes_busier(seed: int) -> None:
    assert not risen(run(seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_kibibyte_leaked_per_second_is_found_in_every_process(seed: int) -> None:
    """The load has about one visit, handoff and operation per second: this is what one object of each takes."""
    assert risen(run(seed, leak_bytes_per_second=1024)) == {f"{process} memory_bytes" for process in LEVELS_MIB}


@pytest.mark.parametrize("seed", range(5))
def test_a_file_descriptor_leaked_every_four_minutes_is_found(seed: int) -> None:
    assert risen(run(seed, fds_per_hour=15)) == {f"{process} fds" for process in LEVELS_MIB}


@pytest.mark.parametrize("seed", range(5))
def test_lookups_that_take_twice_as_long_after_an_hour_are_found_on_a_host_that_becomes_busier(seed: int) -> None:
    assert risen(run(seed, slowdown=1.0)) == {"node lookup p50_ms", "node lookup p99_ms"}


async def test_what_a_process_keeps_is_measured() -> None:
    through = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WASTE, stdin=through, stdout=through)
    assert process.stdin
    assert process.stdout
    seen = []
    for _ in range(4):
        process.stdin.write(b"\n")
        await process.stdout.readline()
        usage = Usage()
        add_usage(usage, process.pid)
        seen.append(usage)
    process.stdin.close()
    await process.wait()
    first, last = seen[0], seen[-1]
    assert last.memory_bytes - first.memory_bytes >= 12 * MIB
    assert (last.fds - first.fds, last.threads - first.threads) == (3, 3)


def test_memory_of_another_process_that_is_read_does_not_count() -> None:
    before, after = Usage(), Usage()
    with Pool.create(64 * MIB) as pool:
        pool.buffer[:] = bytes(64 * MIB)
        add_usage(before, os.getpid())
        with mmap.mmap(pool.fd, 64 * MIB, prot=mmap.PROT_READ) as mapped:
            assert not any(mapped[:: mmap.PAGESIZE])
            add_usage(after, os.getpid())
            assert peers_bytes(os.getpid()) == 64 * MIB
    assert peers_bytes(os.getpid()) == 0
    assert after.memory_bytes - before.memory_bytes < 16 * MIB
