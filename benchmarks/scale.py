"""What one coordinator does with a thousand nodes: `python -m benchmarks.scale`, docs/performance/scale.md."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

from benchmarks.coordinator.layouts import random_keys, resident_bytes
from benchmarks.coordinator.lookups import RawLookupStream
from benchmarks.support import machine
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row
from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.internal.v1.lookup_service_pb2 import LookupRequest
from lmkv.keys import KEY_BYTES
from lmkv_client import Coordinator as Client
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import ServerProcess

NODE_COUNTS = (250, 500, 1000)
QUICK_NODE_COUNTS = (100, 200)
CHUNK_COUNT = 10_000
"""Chunks that each node holds: of 256 tokens, 2.5 million tokens."""
PROCESS_COUNT = 4
PROMPT_CHUNKS = 40
LOOKUP_COUNT = 2000
STEADY_SECONDS = 10.0
WHOLE_SECONDS = 300.0
POLL_SECONDS = 0.002
"""For each node, between two looks at the whole list of them, which itself takes the coordinator some time."""
LEASE_SECONDS = 30
"""Ten times what is usual: here all nodes share their few processors with the coordinator, and may be late."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--nodes", type=int, action="append", metavar="N", help="number of nodes; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """One coordinator for each number of nodes."""
    counts: Sequence[int] = run.args.nodes or (QUICK_NODE_COUNTS if run.quick else NODE_COUNTS)
    run.report.settings.update(chunks_of_a_node=CHUNK_COUNT, node_processes=PROCESS_COUNT, lease_ttl=LEASE_SECONDS)
    for count in counts:
        run.say(f"{count} nodes of {CHUNK_COUNT:,} chunks each")
        with CoordinatorProcess(run.logs / str(count), arguments=["--lease-ttl", str(LEASE_SECONDS)]) as coordinator:
            uvloop.run(_measure_fleet(run, coordinator, count))


async def _measure_fleet(run: BenchmarkRun, coordinator: CoordinatorProcess, count: int) -> None:
    pid = coordinator.pid
    empty_bytes = resident_bytes(pid)
    async with Client(coordinator.address) as client:
        with nodes([coordinator.address], count, run.logs / str(count)):
            started = time.perf_counter()
            await whole(client, count)
            joined = time.perf_counter() - started
            run.add(Row(name=f"scale_join_s_{count}", value=joined, unit="s"))
            grown = resident_bytes(pid) - empty_bytes
            run.add(Row(name=f"scale_bytes_per_chunk_{count}", value=grown / count / CHUNK_COUNT, unit="bytes"))
            await _measure_steady(run, coordinator, count)
            coordinator.kill()
            started = time.perf_counter()
            coordinator.start()
            coordinator.wait_ready()
            await whole(client, count)
            run.add(Row(name=f"scale_whole_s_{count}", value=time.perf_counter() - started, unit="s"))


async def _measure_steady(run: BenchmarkRun, coordinator: CoordinatorProcess, count: int) -> None:
    """While all nodes beat, store and evict: the coordinator's processor time, then lookups beside that."""
    pid = coordinator.pid
    before = machine.cpu_seconds([pid])
    await asyncio.sleep(STEADY_SECONDS)
    share = (machine.cpu_seconds([pid]) - before) / STEADY_SECONDS
    run.add(Row(name=f"scale_cpu_percent_{count}", value=100 * share, unit="% of a core"))
    seconds = []
    async with rpc.open_channel(coordinator.address) as channel, RawLookupStream(channel) as line:
        for number in range(LOOKUP_COUNT):
            # From the middle on, since the oldest chunks are evicted all the while.
            keys = random_keys(1 + number % count, CHUNK_COUNT)[-KEY_BYTES * PROMPT_CHUNKS :]
            began = time.perf_counter()
            answer = await line.ask(LookupRequest(chunk_keys=keys))
            seconds.append(time.perf_counter() - began)
            if len(answer.holders) != 1:
                raise LmkvError(f"a lookup found {len(answer.holders)} holders of what one node has")
    cuts = statistics.quantiles(seconds, n=100)
    run.add(Row(name=f"scale_lookup_p50_ms_{count}", value=1e3 * cuts[49], unit="ms"))
    run.add(Row(name=f"scale_lookup_p99_ms_{count}", value=1e3 * cuts[98], unit="ms"))


async def whole(client: Client, count: int) -> None:
    """Waits until the coordinator has heard everything of every node."""
    deadline = time.monotonic() + WHOLE_SECONDS
    known = 0
    while time.monotonic() < deadline:
        try:
            known = sum(instance.synced for instance in await client.instances())
        except LmkvError:  # it is busy
            known = 0
        if known == count:
            return
        await asyncio.sleep(POLL_SECONDS * count)
    raise LmkvError(f"the coordinator knew all of {known} of {count} nodes after {WHOLE_SECONDS:.0f} s")


@contextmanager
def nodes(addresses: Sequence[str], count: int, logs: Path) -> Iterator[None]:
    """A number of nodes in a few processes; each is a member at every address."""
    with ExitStack() as stack:
        for index in range(PROCESS_COUNT):
            first, last = (1 + count * at // PROCESS_COUNT for at in (index, index + 1))
            command = [sys.executable, "-m", "benchmarks.coordinator.nodes"]
            command += [word for address in addresses for word in ("--coordinator", address)]
            command += ["--first", str(first), "--count", str(last - first), "--chunks", str(CHUNK_COUNT)]
            process = ServerProcess(f"nodes-{index}", command, logs / f"nodes-{index}.log")
            process.start()
            stack.callback(process.stop)
        yield


BENCHMARK = Benchmark(
    name="scale",
    description="Measures one coordinator with up to a thousand nodes of ten thousand chunks each.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
