"""The copies of a hit of SGLang, by HiCache and without it: `python -m benchmarks.sglang`, docs/guides/sglang.md."""

from __future__ import annotations

import argparse
import importlib.util
import sys

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from tests.sglang.engine import install_shims

PROMPT_TOKENS = 1024
PAGE_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--tokens", type=int, default=PROMPT_TOKENS, metavar="N", help="of the prompt (%(default)s)")


def measure(run: BenchmarkRun) -> None:
    """The copies of one prompt."""
    run.report.settings |= {"tokens": run.args.tokens, "page_tokens": PAGE_TOKENS, "dtype": engines.EXACT_DTYPE}
    if importlib.util.find_spec("sglang") is not None:
        install_shims()
    from benchmarks.systems import sglang_copies  # imports SGLang, if it is installed

    sglang_copies.measure(run, run.args.tokens, PAGE_TOKENS)


BENCHMARK = Benchmark(
    name="sglang",
    description="Measures the copies of a hit of SGLang, through HiCache's host pool and without it.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
