"""What each step of the data path costs, and what a hit saves: `python -m benchmarks.data_path`, docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import copies, engines, fetches, hooks, lookups, misses, ttft
from benchmarks.command import Benchmark, Run
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import Engine

PARTS = ("copies", "fetches", "lookups", "ttft", "misses")
LONGEST_PROMPT = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part alone; may be repeated")


def measure(run: Run) -> None:
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
    if "ttft" in parts or "misses" in parts:
        measure_engines(run, dtype, parts)


def measure_lookups(run: Run) -> None:
    """What needs nodes and a coordinator, but no engine."""
    lookups.measure_keys(run)
    with lookups.Nodes(run) as nodes:
        lookups.measure_coordinator(run, nodes.coordinator.address)
        with lookups.attached(nodes.first_socket) as link:
            lookups.measure_engine(run, link)
            hooks.measure(run, link)


def measure_engines(run: Run, dtype: str, parts: Sequence[str]) -> None:
    """What needs engines: two that share, and one without a connector beside them."""
    context_tokens = engines.context_for(LONGEST_PROMPT)
    prompt_bytes = context_tokens * engines.token_bytes(dtype)
    pool_bytes = 5 * prompt_bytes
    options = engines.options(dtype, context_tokens)
    wanted = [
        name for name, part in (("engine-1", ""), ("engine-2", "ttft"), ("plain", "misses")) if part in ("", *parts)
    ]
    engines.check_memory(len(wanted) * (engines.ENGINE_BYTES + 3 * prompt_bytes + pool_bytes))
    model = engines.model_of(run)
    run.say(f"starting {len(wanted)} engines, {dtype}; half a minute or more")
    settings = engines.PATIENCE | engines.pool_setting(pool_bytes)
    with Cluster(run.folder, model, logs=run.logs, settings=settings) as cluster:
        for name in wanted:
            if name != "plain":
                cluster.add_engine(name, **options)
        plain = [Engine(model, run.logs, name="plain", transfer_config=None, **options)] if "plain" in wanted else []
        try:
            engines.start(run, cluster, plain)
            first = cluster.engines["engine-1"]
            if "ttft" in parts:
                assert cluster.coordinator is not None
                ttft.measure(run, cluster.coordinator, first, cluster.engines["engine-2"])
            if "misses" in parts:
                misses.measure(run, cluster, first, plain[0])
            run.say("stopping everything")
        finally:
            for engine in plain:
                engine.process.request_stop()
            cluster.stop()
            for engine in plain:
                engine.stop()


BENCHMARK = Benchmark(
    name="data_path",
    description="Measures what each step of the data path costs, and what a hit saves.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
