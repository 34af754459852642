"""Questions about documents that another engine has computed: `python -m benchmarks.doc_qa`.

Every document goes to engine 1, then the same to engine 2, which takes it from engine 1; then a question about each
goes to both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess

QUESTION_TOKENS = 16
OUTPUT_SHARE = 100
"""Document length. Each document is followed by one output token."""
STORE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentRound:
    """One request per document."""

    seconds: float
    completions: Sequence[Completion]

    @property
    def ttft_seconds(self) -> float:
        """Mean time to the first token."""
        return statistics.fmean(completion.ttft_seconds for completion in self.completions)

    def identical_to(self, other: DocumentRound) -> int:
        """How many completions are the same in both."""
        pairs = zip(self.completions, other.completions, strict=True)
        return sum(own.token_ids == theirs.token_ids for own, theirs in pairs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--documents", type=int, metavar="N", help="number of documents (10; 4 with --quick)")
    parser.add_argument(
        "--document-tokens", type=int, metavar="N", help="length of each document (4104; 2052 with --quick)"
    )
    parser.add_argument("--in-flight", type=int, default=2, metavar="N", help="requests at a time (2)")


def measure(run: BenchmarkRun) -> None:
    """Both engines, all rounds."""
    args = run.args
    dtype = engines.choose_dtype(run, compares_answers=True)
    count = args.documents or (4 if run.quick else 10)
    # Like the 10,000 of the original they leave next to nothing behind their last whole chunk, where questions begin.
    tokens = args.document_tokens or (2052 if run.quick else 4104)
    output_tokens = max(1, tokens // OUTPUT_SHARE)
    run.report.settings |= {
        "documents": count,
        "document_tokens": tokens,
        "output_tokens": output_tokens,
        "in_flight": args.in_flight,
    }
    prompts = Prompts(seed=3)
    documents = [prompts.make(tokens) for _ in range(count)]
    questions = [document + prompts.make(QUESTION_TOKENS) for document in documents]
    context_tokens = engines.context_for(tokens + QUESTION_TOKENS, output_tokens)
    prompt_bytes = context_tokens * engines.token_bytes(dtype)
    pool_bytes = (count + 3) * prompt_bytes
    # Its own cache holds little more than the requests in flight, as in the original: repeated prompts miss it.
    options = engines.options(dtype, context_tokens, prompts_in_cache=args.in_flight + 1)
    engines.check_memory(2 * (engines.ENGINE_BYTES + (args.in_flight + 1) * prompt_bytes + pool_bytes))
    model = engines.model_of(run)
    run.say(f"starting two engines, {dtype}; half a minute or more")
    settings = engines.PATIENCE | engines.pool_setting(pool_bytes)
    with Cluster(run.folder, model, logs=run.logs, settings=settings) as cluster:
        assert cluster.coordinator is not None
        for name in ("engine-1", "engine-2"):
            cluster.add_engine(name, **options)
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        first, second = cluster.engines.values()
        warm_up(cluster, first, second, prompts.make(2 * engines.CHUNK_SIZE))

        def ask(name: str, engine: EngineProcess, what: Sequence[Sequence[int]]) -> DocumentRound:
            round_ = ask_all(engine, what, output_tokens, args.in_flight)
            run.say(f"{name}, {engine.name}: {round_.ttft_seconds:.3f} s mean TTFT, {round_.seconds:.1f} s in all")
            return round_

        first_warm = ask("warm-up round", first, documents)
        for document in documents:
            cluster.coordinator.wait_for_holder(document, first.name, tokens, STORE_SECONDS)
        second_warm = ask("warm-up round", second, documents)
        first_query, second_query = (ask("query round", engine, questions) for engine in (first, second))
        run.say("stopping everything")
    for completion in second_warm.completions:
        engines.check_hit("engine 2's warm-up round", completion, tokens - 1)
    run.add(*rows_of(first_warm, second_warm, first_query, second_query))
    for what, one, other in (("documents", first_warm, second_warm), ("questions", first_query, second_query)):
        engines.check_identical(run, f"{what}, both engines", other.identical_to(one), len(one.completions))


def warm_up(cluster: Cluster, first: EngineProcess, second: EngineProcess, prompt: Sequence[int]) -> None:
    """Has both engines answer once, and meet."""
    assert cluster.coordinator is not None
    first.complete(prompt, 2)
    cluster.coordinator.wait_for_holder(prompt, first.name, len(prompt), STORE_SECONDS)
    second.complete(prompt, 2)


def ask_all(
    engine: EngineProcess, prompts: Sequence[Sequence[int]], output_tokens: int, in_flight: int
) -> DocumentRound:
    """One round with `in_flight` concurrent requests."""
    started = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as clients:
        completions = list(clients.map(lambda prompt: engine.complete(prompt, output_tokens), prompts))
    return DocumentRound(seconds=time.perf_counter() - started, completions=completions)


def rows_of(
    first_warm: DocumentRound, second_warm: DocumentRound, first_query: DocumentRound, second_query: DocumentRound
) -> Iterator[Row]:
    """The gains against engine 1's first round, and what they come from."""
    rounds = {"doc_qa_{}": second_warm, "doc_qa_query_{}": second_query, "doc_qa_own_query_{}": first_query}
    for name, round_ in rounds.items():
        for what, value, base in (
            ("ttft", round_.ttft_seconds, first_warm.ttft_seconds),
            ("round", round_.seconds, first_warm.seconds),
        ):
            baseline = f"engine 1, warm-up: {'mean TTFT' if what == 'ttft' else 'round'}, s"
            yield Row(
                name=f"{name.format(what)}_gain",
                value=100 * (1 - value / base),
                unit="%",
                baseline=baseline,
                baseline_value=base,
                ratio=value / base,
            )
            yield compare(f"{name.format(what)}_s", value, "s", baseline, base)
    same = second_warm.identical_to(first_warm) + second_query.identical_to(first_query)
    count = len(first_warm.completions) + len(first_query.completions)
    yield Row(name="doc_qa_identical", value=100 * same / count, unit="% of completions")


BENCHMARK = Benchmark(
    name="doc_qa",
    description="Sends documents to one engine, then the same to another, then questions about them.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
