"""A fleet under steady load without faults for an hour: what it uses and how long it takes does not rise.

`make soak` runs it for an hour, every run of the tests for some seconds, in which no slope is judged.
LMKV_SOAK_SECONDS is the time of load, LMKV_SOAK_SEED repeats the load, LMKV_SOAK_OUTPUT is the folder of `soak.json`
and `soak.svg`; tests/README.md describes the method.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from lmkv_server.coordinator.services.layout_watch import HISTORY_BYTES
from lmkv_server.node.handoff.table import MAX_ENDED
from tests.chaos.actor import act
from tests.chaos.calm import calm, ready
from tests.chaos.fleet import Fleet
from tests.chaos.operators import MoveActor, PinActor
from tests.chaos.victim import Victim
from tests.chaos.watchers import LayoutWatcher, MetricsWatcher
from tests.histories.workload import HandoffActor, ResultActor, ResumingWatcher, StreamActor
from tests.soak.latencies import HOST, Latencies, TimedAskActor, TimedEngineActor, pipe
from tests.soak.report import Report, Sample
from tests.soak.resources import Resources
from tests.soak.visitor import VisitorActor, fill_history, fill_names_of_handoffs

SECONDS = float(os.environ.get("LMKV_SOAK_SECONDS", "15"))
SEED = int(os.environ.get("LMKV_SOAK_SEED", random.SystemRandom().randrange(1 << 32)))
SAMPLE_SECONDS = 5.0 if SECONDS > 60 else 1.0
JUDGED_SECONDS = 1200.0
"""Shorter runs are not judged: tables and allocators are still growing."""
REST_SECONDS = 900.0
"""What the beginning and the end may take besides, on a slow machine."""
LATENCIES = {"coordinator lookup", "node lookup", "load", "store", HOST}


ONE_HEAP = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"
"""What each thread keeps of freed memory, in a cache and a heap of its own, grows for hours, up to megabytes."""


class CountedFleet(Fleet):
    """A fleet whose processes count their tasks, and forget ended operations after a minute, not after an hour.

    Their threads share one heap without caches: in what these keep, a leak would not be seen for hours.
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        super().__init__(folder, logs, shares_map=True)
        self.resources = Resources(self, folder)

    def _start(self, victim: Victim) -> None:
        self.resources.prepare(victim)
        victim.process.environment["LMKV_OPERATION_TTL"] = "60"
        victim.process.environment["GLIBC_TUNABLES"] = ONE_HEAP
        super()._start(victim)


@pytest.mark.timeout(SECONDS + REST_SECONDS)
async def test_a_fleet_under_steady_load_uses_no_more_and_takes_no_longer(
    tmp_path: Path, short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Path(os.environ.get("LMKV_SOAK_OUTPUT", tmp_path))
    report = Report(run=f"LMKV_SOAK_SEED={SEED} LMKV_SOAK_SECONDS={SECONDS:g}", seconds=SECONDS)
    counts: Counter[str] = Counter()
    with capsys.disabled():
        print(f"\n{report.run}", flush=True)
    try:
        async with CountedFleet(short_folder, tmp_path) as fleet:
            await soak(fleet, report, counts)
            await fleet.end()
    except Exception as error:
        error.add_note(report.run)
        raise
    finally:  # also if the end of the run fails: it was measured
        trends = report.trends()
        report.write(output, trends)
        with capsys.disabled():
            print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
            if SECONDS >= JUDGED_SECONDS:
                print(*trends, f"{output}/soak.json, {output}/soak.svg", sep="\n", flush=True)
    assert {what for sample in report.samples for what in sample.latencies} == LATENCIES
    for sample in report.samples:
        assert sample.usage.keys() == fleet.victims.keys()
        for process, usage in sample.usage.items():
            missing = [name for name, value in usage.values().items() if value <= 0 and (name, process) != NO_TASKS]
            assert not missing, f"{process}: {missing}"
    for done in ("chunks fetched", "chunks stored", "questions answered", "instances that came and went"):
        assert counts[done], done
    if SECONDS >= JUDGED_SECONDS:
        risen = "\n".join(str(trend) for trend in trends if trend.has_risen)
        assert not risen, f"{report.run}: see {output}\n{risen}"


NO_TASKS = ("tasks", "store")
"""The store is no process of lmkv."""


async def soak(fleet: CountedFleet, report: Report, counts: Counter[str]) -> None:
    """Runs the load and samples it; then waits until nothing is left."""
    nodes, coordinators = fleet.nodes, fleet.coordinators
    for node in nodes:
        await ready(node)
    latencies = Latencies()
    engines = [TimedEngineActor(node, 1, SEED, counts) for node in nodes]
    askers = [TimedAskActor(coordinator, SEED, counts) for coordinator in coordinators]
    for engine in engines:
        engine.latencies = latencies
    for asker in askers:
        asker.latencies = latencies
    watchers = [LayoutWatcher(coordinator, SEED, counts) for coordinator in coordinators]
    load = [
        *engines,
        *askers,
        *(actor(nodes, coordinators, SEED, counts) for actor in (MoveActor, PinActor, ResultActor)),
        *(actor(coordinator, SEED, counts) for actor in (StreamActor, VisitorActor) for coordinator in coordinators),
        HandoffActor(nodes[0], nodes[1], SEED, counts),
    ]

    async def sample() -> None:
        began = time.monotonic()
        while time.monotonic() - began < SECONDS or not is_complete():
            await asyncio.sleep(SAMPLE_SECONDS)
            usage = await fleet.resources.usage()
            report.samples.append(Sample(seconds=time.monotonic() - began, usage=usage, latencies=latencies.take()))

    def is_complete() -> bool:
        return {what for sample in report.samples for what in sample.latencies} == LATENCIES and bool(
            counts["chunks fetched"] and counts["instances that came and went"]
        )

    async def run() -> None:
        is_judged = SECONDS >= JUDGED_SECONDS
        history_bytes = HISTORY_BYTES if is_judged else 1
        await asyncio.gather(*(fill_history(coordinator, history_bytes) for coordinator in coordinators))
        await fill_names_of_handoffs(nodes[1], MAX_ENDED if is_judged else 1)
        async with pipe(latencies):
            await act(load, sample())
        counts["chunks compared"] += await calm(fleet, watchers)

    resuming = [ResumingWatcher(coordinator, SEED, counts) for coordinator in coordinators]
    await act([*watchers, *resuming, MetricsWatcher(fleet, SEED, counts)], run())
