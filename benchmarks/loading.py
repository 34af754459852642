"""Whether hits are loaded or computed, by link and load: `python -m benchmarks.loading`.

A simulation with lmkv's own estimator: docs/concepts/load-or-compute.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.replay.files import read_trace
from benchmarks.replay.fleet import PREFILL_RATE
from benchmarks.replay.loading import COMPUTE, DECIDED, LOAD, POLICIES, STORE_TOKENS, TOKEN_BYTES, LoadingEngine
from benchmarks.routing import EXCERPT
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from benchmarks.support.timing import percentile

GBIT = 1e9 / 8
SOURCES: Mapping[str, float] = {"gbit1": GBIT, "gbit10": 10 * GBIT, "gbit100": 100 * GBIT, "disk": 3e9}
"""Bytes per second: links of 1, 10 and 100 Gbit/s, and an NVMe disk."""
LOADS = (50, 80, 95)
"""Percent of what the engine can compute without hits."""
REQUEST_COUNT, QUICK_COUNT = 1_500, 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recorded trace: JSON lines with timestamp, input_length and hash_ids, or a .gz of it (default: ten "
        "minutes of conversations)",
    )


def measure(run: BenchmarkRun) -> None:
    """Every source at every load, with each way to decide."""
    trace = read_trace(run.args.trace or EXCERPT)
    requests = trace.requests[: QUICK_COUNT if run.quick else REQUEST_COUNT]
    token_count = sum(request.token_count for request in requests)
    rate = token_count / requests[-1].arrival_seconds
    run.report.settings |= {
        "requests": len(requests),
        "prompt_tokens": round(token_count / len(requests)),
        "prefill_tokens_per_s": PREFILL_RATE,
        "token_bytes": TOKEN_BYTES,
        "store_tokens": STORE_TOKENS,
    }
    for source, bytes_per_second in SOURCES.items():
        for load in LOADS:
            speed = load / 100 * PREFILL_RATE / rate
            outcomes = {one: LoadingEngine(trace, bytes_per_second, one).replay(requests, speed) for one in POLICIES}
            means = {policy: statistics.mean(outcome.waits) for policy, outcome in outcomes.items()}
            better = min((LOAD, COMPUTE), key=lambda policy: means[policy])
            name = f"{source}_{load}"
            for policy, outcome in outcomes.items():
                if policy == DECIDED:
                    words = better.replace("_", " ")
                    run.add(compare(f"{policy}_{name}_ttft_s", means[policy], "s", words, means[better]))
                    run.add(Row(name=f"{policy}_{name}_loaded", value=outcome.loaded_rate, unit="% of held"))
                else:
                    run.add(Row(name=f"{policy}_{name}_ttft_s", value=means[policy], unit="s"))
                run.add(Row(name=f"{policy}_{name}_p99_s", value=percentile(outcome.waits, 99), unit="s"))
            words = ", ".join(f"{policy} {seconds:.2f}" for policy, seconds in means.items())
            run.say(f"{source}, load {load} %: mean TTFT {words} s")


BENCHMARK = Benchmark(
    name="loading",
    description="Replays a recorded trace over one simulated engine whose hits are behind a link: loaded always, "
    "never, and as lmkv's estimator decides.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
