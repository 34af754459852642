"""Hits and misses of real vLLM engines on a GPU: `python -m benchmarks.engines_gpu`, docs/performance/gpu.md.

Needs a GPU with 80 GB and vLLM for CUDA. The model has the shape of Llama 3.1 8B and random weights. The systems are
an engine without a connector, two that share by lmkv, and one with vLLM's `OffloadingConnector`, all on one GPU. One
request is in flight at a time, but for the rows about throughput.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.node import misses, steps
from benchmarks.node.steps import Steps, StepWatch
from benchmarks.support import engines, timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems import device_handoffs
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.model import Draw, ModelShape, make_model

SHAPE = ModelShape(
    hidden_size=4096,
    intermediate_size=14336,
    layer_count=32,
    head_count=32,
    kv_head_count=8,
    head_size=128,
    vocab_size=128256,
)
"""Llama 3.1 8B: 128 KiB of KV cache a token in bfloat16."""
BLOCK_SIZE = 16
LENGTHS = (273, 513, 1025, 2049, 8193, 16385)
"""One token behind a whole chunk: a hit in any cache leaves one token to compute, so answers must be equal."""
QUICK_LENGTHS = (273, 513, 1025, 8193)
OUTPUT_TOKENS = 16
STORE_SECONDS = 20.0
OFFLOAD_SECONDS = 0.5
"""For stores of `OffloadingConnector`, which does not say when they are done."""
POOL_BYTES = 24 << 30
"""A full pool keeps only one end of a prompt: with the answer, so that the prompt alone is no hit to its last token."""
DECODE_PROMPT_TOKENS = 513
DECODE_TOKENS = 256
DECODE_REQUESTS = 16
NO_DEVICE = 2
"""Exit code where there is no GPU."""
PLAIN, OFFLOADING = "plain", "offloading"
GPU_ENGINE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Environment of engines on a GPU: the scheduler has a process of its own, as vLLM has it; FlashInfer, which samples
where requests limit the choice of tokens, is not needed."""


@dataclass(kw_only=True)
class Hits:
    """TTFT in seconds of every round with prompts of one length, by the system and the cache of the hit."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[Steps]] = field(default_factory=dict)
    """Of hits by lmkv."""
    identical: list[bool] = field(default_factory=list)
    """Whether all hits of a round have the same answer."""
    computed: dict[str, int] = field(default_factory=dict)
    """Requests that computed what could have been a hit, by the name of the hit."""

    def add(self, name: str, completion: Completion) -> None:
        """Adds one request."""
        self.seconds.setdefault(name, []).append(completion.ttft_seconds)

    def add_hit(self, name: str, completion: Completion, token_count: int) -> None:
        """Adds a request that should be a hit of all tokens but the last; counts it if it was none."""
        self.add(name, completion)
        if completion.cached_tokens < token_count - 1:
            self.computed[name] = self.computed.get(name, 0) + 1

    def median_ms(self, name: str) -> float:
        """Median over the rounds."""
        return 1e3 * statistics.median(self.seconds[name])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--rounds", type=int, metavar="N", help="prompts of each length (6; 5 with --quick)")
    parser.add_argument("--cuda-graphs", action="store_true", help="decode with CUDA graphs, as vLLM does by default")


def measure(run: BenchmarkRun) -> None:
    """All systems."""
    run.report.settings |= {
        "dtype": "bfloat16",
        "gpu": torch.cuda.get_device_name(),
        "cuda_graphs": run.args.cuda_graphs,
    }
    run.say(f"{torch.cuda.get_device_name()}: writing a model of {SHAPE.layer_count} layers")
    model = make_model(run.folder / "llama-8b", SHAPE, draw=gpu_draw())
    torch.cuda.empty_cache()
    lengths = QUICK_LENGTHS if run.quick else LENGTHS
    context_tokens = engines.context_for(lengths[-1], DECODE_TOKENS)
    settings = engines.PATIENCE | engines.pool_setting(POOL_BYTES)
    options = engine_options(run, context_tokens)
    with Cluster(run.folder, model, logs=run.logs, settings=settings) as cluster:
        for name in ("engine-1", "engine-2"):
            cluster.add_engine(name, **options)
        cluster.add_engine(PLAIN, **options | {"transfer_config": None})
        started = time.monotonic()
        run.say("starting three engines")
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        run.report.settings["start_seconds"] = round(time.monotonic() - started, 1)
        prompts = Prompts(seed=6)
        for name in ("engine-1", "engine-2"):
            device_handoffs.wait_until_pinned(cluster.engines[name], prompts)
        run.report.settings["stores_after_seconds"] = round(time.monotonic() - started, 1)
        for length in (lengths[1], lengths[-1]):  # warms up
            measure_round(cluster, ("engine-1", "engine-2"), prompts.make(length), Hits())
        for length in lengths:
            add_hits(run, length, rounds_of(run, cluster, ("engine-1", "engine-2"), prompts, length))
        run.say("misses, and an idle engine")
        misses.measure(run, cluster, cluster.engines["engine-1"], cluster.engines[PLAIN])
        measure_decode(run, cluster.engines["engine-1"], cluster.engines[PLAIN], prompts)
        run.say("vLLM's OffloadingConnector in place of the second engine")
        with replaced(cluster, "engine-2", offloading_options(options)):
            for length in (lengths[1], lengths[-1]):  # warms up
                measure_round(cluster, ("engine-1", OFFLOADING), prompts.make(length), Hits())
            for length in lengths:
                add_offloading(run, length, rounds_of(run, cluster, ("engine-1", OFFLOADING), prompts, length))
        run.say("stopping everything")
    device_handoffs.measure(
        run,
        model,
        options,
        lengths=lengths[-2:],
        rounds=rounds(run),
        pool_bytes=POOL_BYTES,
        output_tokens=OUTPUT_TOKENS,
    )


def rounds(run: BenchmarkRun) -> int:
    """Prompts of each length."""
    given: int | None = run.args.rounds
    return given or (5 if run.quick else 6)


def gpu_draw() -> Draw:
    """Draws weights on the GPU, which takes seconds."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(dimensions: tuple[int, ...], deviation: float) -> memoryview:
        values = torch.randn(dimensions, generator=generator, device="cuda", dtype=torch.bfloat16).mul_(deviation)
        return values.cpu().view(torch.int16).numpy().data

    return draw


def engine_options(run: BenchmarkRun, context_tokens: int) -> dict[str, Any]:
    """Arguments of all engines: three of them fit into 80 GB."""
    extra = ["--gpu-memory-utilization", "0.25"]
    if run.args.cuda_graphs:
        extra += ["--no-enforce-eager", "--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
    return {
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "context_tokens": context_tokens,
        "kv_cache_bytes": 2 * context_tokens * SHAPE.kv_bytes_per_token(2),
        "extra_arguments": extra,
        "environment": GPU_ENGINE,
    }


def offloading_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM's own cache in host memory, as large as lmkv's."""
    extra = {"cpu_bytes_to_use": POOL_BYTES, "block_size": engines.CHUNK_SIZE}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return options | {"transfer_config": transfer}


@contextmanager
def replaced(cluster: Cluster, name: str, options: dict[str, Any]) -> Iterator[EngineProcess]:
    """Ends one engine, so that its memory on the GPU is free, and starts one with other options."""
    cluster.engines[name].stop()
    engine = cluster.add_engine(OFFLOADING, **options)
    with engine:
        yield engine


def rounds_of(run: BenchmarkRun, cluster: Cluster, names: Sequence[str], prompts: Prompts, length: int) -> Hits:
    """Asks several prompts of one length."""
    hits = Hits()
    for _ in range(rounds(run)):
        measure_round(cluster, names, prompts.make(length), hits)
    words = ", ".join(f"{hits.median_ms(name):.1f} ms {name}" for name in hits.seconds)
    run.say(f"{length} tokens: {words}; answers equal in {sum(hits.identical)} of {len(hits.identical)} rounds")
    for name, count in hits.computed.items():
        run.note(f"{name}: {count} of {len(hits.identical)} prompts of {length} tokens were computed, not loaded")
    if different := hits.identical.count(False):
        run.fail(f"{length} tokens: answers to {different} of {len(hits.identical)} prompts depend on the cache")
    return hits


def measure_round(cluster: Cluster, names: Sequence[str], prompt: Sequence[int], hits: Hits) -> None:
    """Asks one prompt of the engine without a connector, then of the first named, then of the second.

    If the second shares with the first, it takes the prompt from there. Raises `LmkvError` if a hit is none.
    """
    plain, first, second = (cluster.engines[name] for name in (PLAIN, *names))
    cold = plain.complete(prompt, OUTPUT_TOKENS)
    engines.check_miss("cold", cold)
    prefix = plain.complete(prompt, OUTPUT_TOKENS)
    engines.check_hit("vLLM's prefix cache", prefix, len(prompt) - 1)
    hits.add("cold", cold)
    hits.add("prefix", prefix)
    first.complete(prompt, OUTPUT_TOKENS)
    assert cluster.coordinator is not None
    cluster.coordinator.wait_for_holder(prompt, first.name, len(prompt) - 1, STORE_SECONDS)
    first.reset_prefix_cache()
    answers = [prefix.token_ids, _hit(first, prompt, "own", hits).token_ids]
    if second.name == OFFLOADING:
        second.complete(prompt, OUTPUT_TOKENS)
        time.sleep(OFFLOAD_SECONDS)
        second.reset_prefix_cache()
        offloaded = second.complete(prompt, OUTPUT_TOKENS)
        hits.add_hit(OFFLOADING, offloaded, len(prompt))
        answers.append(offloaded.token_ids)
    else:
        answers.append(_hit(second, prompt, "peer", hits).token_ids)
    hits.identical.append(all(answer == answers[0] for answer in answers))


def _hit(engine: EngineProcess, prompt: Sequence[int], what: str, hits: Hits) -> Completion:
    watch = StepWatch(engine)
    completion = engine.complete(prompt, OUTPUT_TOKENS)
    hits.add_hit(what, completion, len(prompt))
    hits.steps.setdefault(what, []).append(watch.steps(completion))
    return completion


def add_hits(run: BenchmarkRun, length: int, hits: Hits) -> None:
    """Adds rows for lmkv beside vLLM's prefix cache."""
    prefix_ms = hits.median_ms("prefix")
    run.add(
        Row(name=f"ttft_cold_ms_{length}", value=hits.median_ms("cold"), unit="ms"),
        compare(f"ttft_prefix_hit_ms_{length}", prefix_ms, "ms", "cold", hits.median_ms("cold")),
    )
    for name in ("own", "peer"):
        run.add(compare(f"ttft_{name}_ms_{length}", hits.median_ms(name), "ms", "vLLM's own prefix hit", prefix_ms))
    run.add(*steps.rows_of(hits.steps, f"_{length}"))
    run.add(Row(name=f"ttft_identical_{length}", value=100 * statistics.mean(hits.identical), unit="%"))


def add_offloading(run: BenchmarkRun, length: int, hits: Hits) -> None:
    """Adds the row for lmkv beside vLLM's offloading, if that had hits."""
    if OFFLOADING in hits.computed:
        return
    run.add(
        compare(
            f"ttft_own_vs_offloading_ms_{length}",
            hits.median_ms("own"),
            "ms",
            "OffloadingConnector",
            hits.median_ms(OFFLOADING),
        )
    )


def measure_decode(run: BenchmarkRun, ours: EngineProcess, plain: EngineProcess, prompts: Prompts) -> None:
    """Adds the row for what storing decoded tokens costs: many requests at once, which decode most of the time."""

    def seconds(engine: EngineProcess) -> float:
        batch = [prompts.make(DECODE_PROMPT_TOKENS) for _ in range(DECODE_REQUESTS)]
        started = time.perf_counter()
        with ThreadPoolExecutor(DECODE_REQUESTS) as clients:
            list(clients.map(lambda prompt: engine.complete(prompt, DECODE_TOKENS), batch))
        return time.perf_counter() - started

    sides: tuple[list[float], list[float]] = ([], [])
    for number in range((2 if run.quick else 4) + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            took = seconds((ours, plain)[side])
            if number:  # the first warms up
                sides[side].append(took)
    tokens = DECODE_REQUESTS * DECODE_TOKENS
    ratio = timing.median_ratio(*sides)
    run.add(
        Row(
            name="decode_overhead",
            value=100 * (1 - 1 / ratio),
            unit="% of throughput",
            baseline="no connector, tokens/s",
            baseline_value=tokens / statistics.median(sides[1]),
            ratio=1 / ratio,
        )
    )


BENCHMARK = Benchmark(
    name="engines_gpu",
    description="Measures hits and misses of vLLM engines on a GPU, beside vLLM's own caches.",
    measure=measure,
    add_arguments=add_arguments,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it. Returns the exit code."""
    BENCHMARK.parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("engines_gpu: no CUDA device", file=sys.stderr)
        return NO_DEVICE
    return BENCHMARK.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
