"""Two coordinators with a layout map each, or with one in Valkey that they share: `python -m benchmarks.shared_map`."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.coordinator.lookups import RawLookupStream
from benchmarks.coordinator.nodes import SPEC, ScaledNode
from benchmarks.scale import CHUNK_COUNT, LEASE_SECONDS, STEADY_SECONDS, nodes, whole
from benchmarks.support import machine
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.redis import RedisProcess
from benchmarks.support.rows import Row, compare
from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.internal.v1.lookup_service_pb2 import LookupRequest
from lmkv_client import Coordinator as Client
from lmkv_client.demo.cluster import CoordinatorProcess

COORDINATOR_COUNT = 2
NODE_COUNT = 300
QUICK_NODE_COUNT = 100
NEWS_COUNT = 200
"""Chunks whose way to both coordinators is timed."""
NEWS_SECONDS = 10.0
"""Longest that one may take."""
BASELINE = "a map for each"


class Figures(NamedTuple):
    """What one way of keeping the map gave."""

    join_seconds: float
    cpu_percent: float
    """Of both coordinators together."""
    store_cpu_percent: float
    news_seconds: list[float]
    whole_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")


def measure(run: BenchmarkRun) -> None:
    """The same fleet twice."""
    count: int = run.args.nodes or (QUICK_NODE_COUNT if run.quick else NODE_COUNT)
    run.report.settings.update(nodes=count, chunks_of_a_node=CHUNK_COUNT, coordinators=COORDINATOR_COUNT)
    figures = {}
    for name, shares in (("own", False), ("shared", True)):
        run.say(f"{count} nodes, {COORDINATOR_COUNT} coordinators, {'one map' if shares else BASELINE}")
        with ExitStack() as stack:
            store = stack.enter_context(RedisProcess(run.logs / name)) if shares else None
            environment = {"LMKV_LEASE_TTL": str(LEASE_SECONDS), "LMKV_LAYOUT_MAP_URL": store.url if store else ""}
            coordinators = [
                stack.enter_context(CoordinatorProcess(run.logs / name / str(index), environment=environment))
                for index in range(COORDINATOR_COUNT)
            ]
            figures[name] = uvloop.run(_measure_fleet(coordinators, store, count, run.logs / name))
    own, shared = figures["own"], figures["shared"]
    run.add(compare("shared_join_s", shared.join_seconds, "s", BASELINE, own.join_seconds))
    run.add(compare("shared_cpu_percent", shared.cpu_percent, "% of a core", BASELINE, own.cpu_percent))
    run.add(Row(name="shared_store_cpu_percent", value=shared.store_cpu_percent, unit="% of a core"))
    for percentile in (50, 99):
        cuts = [1e3 * statistics.quantiles(each.news_seconds, n=100)[percentile - 1] for each in (shared, own)]
        run.add(compare(f"shared_news_p{percentile}_ms", cuts[0], "ms", BASELINE, cuts[1]))
    run.add(compare("shared_whole_s", shared.whole_seconds, "s", BASELINE, own.whole_seconds))


async def _measure_fleet(
    coordinators: Sequence[CoordinatorProcess], store: RedisProcess | None, count: int, logs: Path
) -> Figures:
    addresses = [coordinator.address for coordinator in coordinators]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for address in addresses]
        with nodes(addresses, count, logs):
            started = time.perf_counter()
            await asyncio.gather(*(whole(client, count) for client in clients))
            joined = time.perf_counter() - started
            used = [machine.cpu_seconds([coordinator.pid for coordinator in coordinators])]
            stored = [machine.cpu_seconds([store.pid]) if store else 0.0]
            await asyncio.sleep(STEADY_SECONDS)
            used.append(machine.cpu_seconds([coordinator.pid for coordinator in coordinators]))
            stored.append(machine.cpu_seconds([store.pid]) if store else 0.0)
            news = await _measure_news(addresses, count + 1)
            coordinators[0].kill()
            started = time.perf_counter()
            coordinators[0].start()
            coordinators[0].wait_ready()
            await whole(clients[0], count)
            again = time.perf_counter() - started
    per_cent = 100 / STEADY_SECONDS
    return Figures(joined, per_cent * (used[1] - used[0]), per_cent * (stored[1] - stored[0]), news, again)


async def _measure_news(addresses: Sequence[str], number: int) -> list[float]:
    """Seconds until every coordinator reports a new chunk of a node."""
    node = ScaledNode(number, 0)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(node.member(addresses))
        await fleet.started()
        lines = []
        for address in addresses:
            channel = await stack.enter_async_context(rpc.open_channel(address))
            lines.append(await stack.enter_async_context(RawLookupStream(channel)))
        seconds = []
        for _ in range(NEWS_COUNT):
            key = node.gain(fleet)
            began = time.perf_counter()
            await asyncio.gather(*(_found(line, key, began) for line in lines))
            seconds.append(time.perf_counter() - began)
    return seconds


async def _found(line: RawLookupStream, key: bytes, began: float) -> None:
    while time.perf_counter() - began < NEWS_SECONDS:
        if (await line.ask(LookupRequest(chunk_keys=key))).holders:
            return
    raise LmkvError(f"a coordinator does not know a chunk of {SPEC.model_name} after {NEWS_SECONDS:g} s")


BENCHMARK = Benchmark(
    name="shared_map",
    description="Measures two coordinators that share a layout map beside two that keep their own.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
