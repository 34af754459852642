"""The cost of each step of the data path, and the time a hit saves: `python -m benchmarks.data_path`.

docs/performance/data-path.md shows the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.node import audits, copies, fetches, hooks, lookups, misses, short_hits, ttft
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from lmkv_client.demo.cluster import Cluster

PARTS = ("copies", "fetches", "lookups", "ttft", "hits", "misses", "audits")
PLAIN = "plain"
"""Name of the engine without a connector."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """All parts, those without engines first."""
    parts: Sequence[str] = run.args.only or PARTS
    dtype = engines.choose_dtype(run)
    run.report.settings["parts"] = list(parts)
    if "copies" in parts:
        run.say("copies between pages and pool")
        copies.measure(run, engines.kv_spec(dtype))
    if "fetches" in parts:
        run.say("fetches from node to node")
        fetches.measure(run, dtype)
    if "lookups" in parts:
        run.say("keys, lookups and hooks")
        measure_lookups(run)
    if {"ttft", "hits", "misses"} & set(parts):
        measure_engines(run, dtype, parts)
    if "audits" in parts:
        with started(run, dtype, [*audits.SETTINGS]) as cluster:
            audits.measure(run, cluster)


def measure_lookups(run: BenchmarkRun) -> None:
    """What needs nodes and a coordinator, but no engine."""
    lookups.measure_keys(run)
    with lookups.filled_pair(run) as pair:
        lookups.measure_coordinator(run, pair.coordinator.address)
        with lookups.attached(pair.first_socket) as (link, attachment):
            hooks.measure(run, link)
            lookups.measure_engine(run, link, attachment)


def measure_engines(run: BenchmarkRun, dtype: str, parts: Sequence[str]) -> None:
    """What needs engines: two that share, and one without a connector beside them."""
    needed = {"engine-1": PARTS, "engine-2": ("ttft", "hits"), PLAIN: ("hits", "misses")}
    with started(run, dtype, [name for name, users in needed.items() if set(users) & set(parts)]) as cluster:
        first = cluster.engines["engine-1"]
        assert cluster.coordinator is not None
        if "ttft" in parts:
            ttft.measure(run, cluster.coordinator, first, cluster.engines["engine-2"])
        if "hits" in parts:
            short_hits.measure(run, cluster.coordinator, first, cluster.engines["engine-2"], cluster.engines[PLAIN])
        if "misses" in parts:
            misses.measure(run, cluster, first, cluster.engines[PLAIN])
        run.say("stopping everything")


@contextmanager
def started(run: BenchmarkRun, dtype: str, names: Sequence[str]) -> Iterator[Cluster]:
    """Engines of these names, all ready; the one called `PLAIN` has no connector."""
    context_tokens = engines.context_for(max(ttft.LENGTHS))
    prompt_bytes = context_tokens * engines.token_bytes(dtype)
    pool_bytes = 5 * prompt_bytes
    engines.check_memory(len(names) * (engines.ENGINE_BYTES + 3 * prompt_bytes + pool_bytes))
    model = engines.model_of(run)
    run.say(f"starting {len(names)} engines, {dtype}; half a minute or more")
    settings = engines.PATIENCE | engines.pool_setting(pool_bytes)
    with Cluster(run.folder, model, logs=run.logs, settings=settings) as cluster:
        for name in names:
            options = engines.options(dtype, context_tokens)
            if name == PLAIN:
                options["transfer_config"] = None
            cluster.add_engine(name, audits.SETTINGS.get(name), **options)
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        yield cluster


BENCHMARK = Benchmark(
    name="data_path",
    description="Measures what each step of the data path costs, and what a hit saves.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
