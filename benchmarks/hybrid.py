"""Models with layers of several kinds: `python -m benchmarks.hybrid`, docs/performance/hybrid.md.

Two engines of each architecture share prompts. Bytes are those that the engines and their nodes count, for each 1,000
tokens of a prompt; they are compared with what the prompt would take if every layer attended to everything, and with
vLLM's OffloadingConnector. The models are tiny, but their layers are mixed as in real ones: bytes for each token scale
with the model, ratios stay.

`--trace FILE` starts no engine: it counts what hits of recorded prompts lose because not all windows are stored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replay.files import TRACE_HELP, read_trace, trace_name
from benchmarks.replay.windows import count_windows
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems.chats import offloading_engine
from lmkv.spec import DTYPE_BYTES, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from tests.support.models import ARCHITECTURES, configuration, make_architecture

OUTPUT_TOKENS = 4
SHORT_PROMPT = (5, 6, 7, 8)
"""Has an engine take a step, which reports its counters."""
PROMPT_TOKENS = 4097
"""One token behind the last whole chunk."""
POOL_BYTES = 512 << 20
STORE_SECONDS = 30.0
FULL_ATTENTION = "full attention in every layer"
OFFLOADING = "vLLM's OffloadingConnector"

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "sliding_window": 128,
    },
    "gemma3": {
        "num_hidden_layers": 12,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "sliding_window": 1024,
    },
    "llama4": {"attention_chunk_size": 1536},
    "lfm2": {},
    "qwen3_next": {},
}
"""What makes the tiny models resemble real ones, by architecture: how layers are mixed, and their windows."""
QUICK = ("gpt_oss", "gemma3")
WINDOWED = (*QUICK, "llama4")
"""Those whose layers all attend to tokens: states have no like in full attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBytes:
    """Bytes that one prompt has moved."""

    stored: float
    loaded: float
    fetched: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--only", action="append", choices=tuple(SHAPES), help="this architecture; may be repeated")
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help=TRACE_HELP + "; may be repeated")
    parser.add_argument("--rounds", type=int, metavar="N", help="prompts of each system (5; 2 with --quick)")


def measure(run: BenchmarkRun) -> None:
    """Every architecture."""
    if run.args.trace:
        count_traces(run)
        return
    run.report.settings |= {"prompt_tokens": PROMPT_TOKENS, "dtype": "float32, of Qwen3-Next in bfloat16"}
    for name in run.args.only or (QUICK if run.quick else SHAPES):
        model = make_architecture(run.folder / name, name, **SHAPES[name])
        measure_architecture(run, name, model)


def count_traces(run: BenchmarkRun) -> None:
    """Adds the rows of recorded prompts."""
    for file in run.args.trace:
        trace = read_trace(file)
        for name in QUICK:
            counts = count_windows(trace, window_spec(name, trace.chunk_tokens))
            row = f"{name}_{trace_name(file)}"
            run.add(Row(name=f"{row}_kept", value=100 * counts.kept_share, unit="%"))
            run.add(Row(name=f"{row}_bytes_ratio", value=counts.bytes_ratio, unit="times the least"))


def window_spec(name: str, chunk_size: int) -> KvSpec:
    """The spec of a model with two kinds of layers, with chunks of this size."""
    config = configuration(name, **SHAPES[name])
    layers = config["layer_types"]
    shape = {"kv_head_count": config["num_key_value_heads"], "head_size": config["head_dim"], "kv_dtype": "bfloat16"}
    windows = KvPart(
        rule=PART_RULE_LAST,
        span=config["sliding_window"],
        layer_count=layers.count("sliding_attention"),
        **shape,
    )
    full_count = layers.count("full_attention")
    return KvSpec(
        model_name=name, model_id=name, chunk_size=chunk_size, layer_count=full_count, more_parts=(windows,), **shape
    )


def measure_architecture(run: BenchmarkRun, name: str, model: Path) -> None:
    """Adds the rows of one architecture."""
    architecture = ARCHITECTURES[name]
    token_count = (PROMPT_TOKENS - 1) // architecture.chunk_size * architecture.chunk_size
    new = Prompts(seed=7)
    prompts = [new.make(PROMPT_TOKENS) for _ in range(run.args.rounds or (2 if run.quick else 5))]
    run.say(f"{name}: starting two engines, {architecture.dtype}; half a minute or more")
    settings = engines.PATIENCE | engines.pool_setting(POOL_BYTES) | {"LMKV_CHUNK_SIZE": str(architecture.chunk_size)}
    options: dict[str, Any] = {"dtype": architecture.dtype, "context_tokens": engines.context_for(PROMPT_TOKENS)}
    with Cluster(run.folder, model, logs=run.logs, settings=settings) as cluster:
        for engine_name in (f"{name}-1", f"{name}-2"):
            cluster.add_engine(engine_name, **options)
        cluster.start_engines()
        moved = share(run, name, cluster, prompts, token_count)
    if name in WINDOWED:
        add_bytes(run, name, moved, full_attention_bytes(name), FULL_ATTENTION)
    else:
        run.add(Row(name=f"{name}_fetched_kib", value=moved.fetched / 1024, unit="KiB"))
    run.say(f"{name}: starting an engine with vLLM's OffloadingConnector")
    with offloading_engine(run, model, POOL_BYTES, **options) as engine:
        offloaded = offload(name, engine, prompts, token_count)
    add_bytes(run, f"{name}_offloading", moved, offloaded, OFFLOADING)


def share(
    run: BenchmarkRun, name: str, cluster: Cluster, prompts: Sequence[Sequence[int]], token_count: int
) -> PromptBytes:
    """Has both engines complete each prompt; adds rows for the TTFT, and returns bytes for each 1,000 tokens."""
    first, second = cluster.engines.values()
    assert cluster.coordinator
    for engine in (first, second):
        engine.complete(Prompts(seed=1).make(2 * engines.CHUNK_SIZE), OUTPUT_TOKENS)  # warms up
        engine.complete(SHORT_PROMPT, 1)
    unchanged = first.metrics()
    first.complete(SHORT_PROMPT, 1)  # stores its end again
    before = [first.metrics(), second.metrics()]
    seconds: dict[str, list[float]] = {"cold": [], "own": [], "peer": []}
    completions: list[Completion] = []
    for prompt in prompts:
        completions.append(first.complete(prompt, OUTPUT_TOKENS))
        engines.check_miss(name, completions[-1])
        cluster.coordinator.wait_for_holder(prompt, first.name, token_count, STORE_SECONDS)
    first.complete(SHORT_PROMPT, 1)
    stored, of_short = _grown(first.metrics(), before[0]), _grown(before[0], unchanged)
    for prompt, cold in zip(prompts, completions, strict=True):
        peer = second.complete(prompt, OUTPUT_TOKENS)
        first.reset_prefix_cache()
        own = first.complete(prompt, OUTPUT_TOKENS)
        for what, completion in (("own", own), ("peer", peer)):
            engines.check_hit(f"{name}, {what}", completion, token_count)
        if ARCHITECTURES[name].dtype == engines.EXACT_DTYPE and not cold.token_ids == own.token_ids == peer.token_ids:
            run.fail(f"{name}: the completions of one prompt differ")
        for what, completion in (("cold", cold), ("own", own), ("peer", peer)):
            seconds[what].append(completion.ttft_seconds)
    for engine in (first, second):
        engine.complete(SHORT_PROMPT, 1)
    grown = [_grown(engine.metrics(), then) for engine, then in zip((first, second), before, strict=True)]
    medians = {what: 1e3 * statistics.median(values) for what, values in seconds.items()}
    run.add(Row(name=f"{name}_cold_ttft_ms", value=medians["cold"], unit="ms"))
    for what in ("own", "peer"):
        run.add(compare(f"{name}_{what}_ttft_ms", medians[what], "ms", "miss", medians["cold"]))
    scale = 1000 / (len(prompts) * token_count)
    return PromptBytes(
        stored=scale * (stored["lmkv:stored_bytes_total"] - of_short["lmkv:stored_bytes_total"]),
        loaded=scale * grown[0]["lmkv:loaded_bytes_total"],
        fetched=scale * grown[1]["lmkv:peer_bytes_total"],
    )


def _grown(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much the metrics have grown."""
    return {key: value - then.get(key, 0.0) for key, value in now.items()}


def full_attention_bytes(name: str) -> PromptBytes:
    """What 1,000 tokens take if each layer keeps K and V of all of them, as in a model without other layers."""
    config = configuration(name, **SHAPES[name])
    heads, size, layers = config["num_key_value_heads"], config["head_dim"], config["num_hidden_layers"]
    token_bytes = 2 * layers * heads * size * DTYPE_BYTES[ARCHITECTURES[name].dtype]
    return PromptBytes(stored=1000 * token_bytes, loaded=1000 * token_bytes, fetched=1000 * token_bytes)


def offload(name: str, engine: EngineProcess, prompts: Sequence[Sequence[int]], token_count: int) -> PromptBytes:
    """Has the engine complete each prompt twice; bytes for each 1,000 tokens."""
    engine.wait_ready()
    engine.complete(Prompts(seed=1).make(2 * engines.CHUNK_SIZE), OUTPUT_TOKENS)
    engine.complete(SHORT_PROMPT, 1)
    before = engine.metrics()
    for prompt in prompts:
        engines.check_miss(f"{name}, offloading", engine.complete(prompt, OUTPUT_TOKENS))
        engine.complete(SHORT_PROMPT, OUTPUT_TOKENS)  # the steps that end its stores
        engine.reset_prefix_cache()
        engines.check_hit(f"{name}, offloading", engine.complete(prompt, OUTPUT_TOKENS), token_count)
    engine.complete(SHORT_PROMPT, 1)
    grown = _grown(engine.metrics(), before)
    scale = 1000 / (len(prompts) * token_count)
    return PromptBytes(
        stored=scale * grown["vllm:kv_offload_store_bytes_total"],
        loaded=scale * grown["vllm:kv_offload_load_bytes_total"],
    )


def add_bytes(run: BenchmarkRun, prefix: str, moved: PromptBytes, baseline: PromptBytes, named: str) -> None:
    """Adds rows that compare bytes with a baseline; none for what the baseline does not do."""
    for what in ("stored", "loaded", "fetched"):
        value, other = getattr(moved, what), getattr(baseline, what)
        if other:
            run.add(compare(f"{prefix}_{what}_kib", value / 1024, "KiB", named, other / 1024))


BENCHMARK = Benchmark(
    name="hybrid",
    description="Measures bytes and TTFT of models with sliding windows, local chunks and states.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
