"""The connector's hooks: what they cost in a step in which there is nothing for them to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.node.lookups import SPEC
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from lmkv.config import ConnectorConfig

if TYPE_CHECKING:
    from lmkv_client.engine.node.client import NodeClient

BATCH = 2000
"""Calls that are timed together: one takes about a microsecond."""


def measure(run: BenchmarkRun, link: NodeClient) -> None:
    """Adds rows for a scheduler side that is attached to a node, and a worker side beside it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    from lmkv_client.connector.engine_kv import EngineKv, LayerGroup
    from lmkv_client.connector.identity import head_shares
    from lmkv_client.connector.scheduler.side import SchedulerSide
    from lmkv_client.connector.scheduler.stores import SchedulerOptions
    from lmkv_client.connector.worker.side import WorkerSide

    groups = (LayerGroup(part=0, block_size=SPEC.block_size, layer_names=()),)
    kv = EngineKv(spec=SPEC, groups=groups, hash_block_size=SPEC.block_size)
    scheduler = SchedulerSide(ConnectorConfig(), kv, link, SchedulerOptions(rank_count=1, step_tokens=8192))
    worker = WorkerSide(SPEC, head_shares(SPEC, 0, 1), groups=groups, rank=0, threads=1)
    nothing = SchedulerOutput.make_empty()

    def step() -> None:
        plan = scheduler.plan(nothing)
        worker.load(plan)
        worker.store(plan)
        worker.take_finished()
        worker.take_failed_blocks()
        worker.take_report()
        scheduler.take_stats()

    batches = 20 if run.quick else 100
    try:
        run.add(
            Row(name="hook_idle_us", value=microseconds(lambda: scheduler.plan(nothing), batches), unit="us"),
            Row(name="hooks_idle_step_us", value=microseconds(step, batches), unit="us"),
        )
    finally:
        worker.close()


def microseconds(act: Callable[[], object], batches: int) -> float:
    """Median time of one call."""
    times = []
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(BATCH):
            act()
        times.append((time.perf_counter() - started) / BATCH)
    return 1e6 * statistics.median(times)
