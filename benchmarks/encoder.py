"""Measures how much TTFT a stored encoder output saves: `python -m benchmarks.encoder`, docs/performance/encoder.md.

Each prompt has a picture. One engine encodes all of them; then an engine at the same node and an engine at another node
see the same pictures for the first time. Every system runs with vLLM's own caches on, which have none of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import compare
from lmkv.errors import LmkvError
from lmkv.tiers import HOST
from tests.engines.llm import LlmFleet, LlmProcess, Nursery, Picture, make_prompt
from tests.support.models import make_unusual

SIZE = 224
"""Pixels of a picture's side."""
PLACES = 256
HIDDEN = 512
OUTPUT_BYTES = PLACES * HIDDEN * 4
PROMPT = make_prompt(1, 32)
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.02
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIZE,
    "patch_size": 14,
}
"""A ViT-B."""
QFORMER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "vocab_size": 32,
    "encoder_hidden_size": 768,
    "cross_attention_frequency": 1,
}
ENGINE: Mapping[str, Any] = {"transfer_config": None, "max_model_len": 1024, "block_size": 32}


@dataclass(kw_only=True)
class Times:
    """One engine's answers to the pictures, and how long each took."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    runs: int = 0
    """Pictures that were encoded; of engines without a connector 0."""

    @property
    def median_ms(self) -> float:
        """The median TTFT."""
        return 1e3 * statistics.median(self.seconds)


def make_model(folder: Path) -> Path:
    """A BLIP-2 whose encoder is as large as real ones, with a small decoder."""
    text = {"model_type": "opt", "hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "num_hidden_layers": 4}
    text |= {"ffn_dim": 2 * HIDDEN, "num_attention_heads": 8, "max_position_embeddings": 2048, "pad_token_id": 2}
    text |= {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1}
    parts = {"vision_config": VISION, "qformer_config": QFORMER, "text_config": text}
    return make_unusual(folder / "pictures", "pictures", num_query_tokens=PLACES, **parts)


def measure(run: BenchmarkRun) -> None:
    """The engine alone, lmkv, and vLLM's connector that stores files."""
    count = 4 if run.quick else 15
    run.report.settings |= {"pictures": count, "picture_pixels": SIZE * SIZE, "output_bytes": OUTPUT_BYTES}
    model = make_model(run.folder)
    run.logs.mkdir(parents=True, exist_ok=True)
    pictures = [Picture(seed=seed, size=SIZE) for seed in range(1, count + 1)]
    with Nursery(run.logs) as nursery:
        alone = measure_alone(run, nursery, model, pictures)
        miss, own, peer = measure_lmkv(run, nursery, model, pictures)
        files_miss, files_hit = measure_files(run, nursery, model, pictures)
    run.note("vLLM's ECCPUConnector was not measured: it needs runner V2, which does not run on CPUs")
    run.add(
        compare("encoder_miss_ms", miss.median_ms, "ms", "without a connector", alone.median_ms),
        compare("encoder_own_hit_ms", own.median_ms, "ms", "encoded", miss.median_ms),
        compare("encoder_peer_hit_ms", peer.median_ms, "ms", "encoded", miss.median_ms),
        compare("encoder_files_miss_ms", files_miss.median_ms, "ms", "without a connector", alone.median_ms),
        compare("encoder_files_hit_ms", files_hit.median_ms, "ms", "encoded", files_miss.median_ms),
    )
    for what, times in (("own", own), ("peer", peer), ("files", files_hit), ("miss", miss), ("files_miss", files_miss)):
        if times.tokens != alone.tokens:
            run.fail(f"{what}: answers differ from those of an engine without a connector")
        if times.runs != (count if "miss" in what else 0):
            run.fail(f"{what}: the encoder ran for {times.runs} of {count} pictures")


def ask(engine: LlmProcess, pictures: Sequence[Picture]) -> Times:
    """Has an engine see each picture once, after one that warms it up."""
    engine.ask(PROMPT, picture=Picture(seed=0, size=SIZE, uuid=engine.name), max_tokens=1)
    counts = "ec_transfer_config" in engine.options
    before = engine.encoder_runs() if counts else 0
    times = Times()
    for shown in pictures:
        answers = engine.ask(PROMPT, picture=shown, max_tokens=1)
        times.seconds.append(answers.seconds)
        times.tokens.append(answers.token_ids[0])
    times.runs = engine.encoder_runs() - before if counts else 0
    return times


def measure_alone(run: BenchmarkRun, nursery: Nursery, model: Path, pictures: Sequence[Picture]) -> Times:
    """An engine without a connector."""
    run.say("starting an engine without a connector")
    with LlmFleet(nursery, model, run.logs) as fleet:
        engine = fleet.add("alone", **ENGINE)
        fleet.start()
        return ask(engine, pictures)


def measure_lmkv(run: BenchmarkRun, nursery: Nursery, model: Path, pictures: Sequence[Picture]) -> tuple[Times, ...]:
    """Encoded by the first engine; then loaded at its node, and at another one."""
    run.say("starting three engines with lmkv")
    options = {**ENGINE, "ec_transfer_config": {"ec_connector": "LMKVECConnector", "ec_role": "ec_both"}}
    with LlmFleet(nursery, model, run.logs, coordinator=True) as fleet:
        first = fleet.add("first", **options)
        peer = fleet.add("peer", **options)
        fleet.start()
        second = fleet.add("second", {"node_address": str(fleet.runtime_dir / "first" / "engine.sock")}, **options)
        fleet.start()
        miss = ask(first, pictures)
        wait_for_outputs(fleet, len(pictures))
        return miss, ask(second, pictures), ask(peer, pictures)


def wait_for_outputs(fleet: LlmFleet, count: int) -> None:
    """Waits until the coordinator knows this number of outputs at the first node. Raises `LmkvError` on timeout."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        usages = fleet.coordinator.instances()["first"].tiers
        if sum(usage.used_bytes for usage in usages if usage.tier == HOST) >= count * OUTPUT_BYTES:
            return
        if time.monotonic() > deadline:
            raise LmkvError(f"after {WAIT_SECONDS:.0f} s the coordinator does not know all outputs")
        time.sleep(POLL_SECONDS)


def measure_files(run: BenchmarkRun, nursery: Nursery, model: Path, pictures: Sequence[Picture]) -> tuple[Times, Times]:
    """vLLM's connector for trials: each output is a file in a folder that engines share."""
    run.say("starting two engines with vLLM's ECExampleConnector")
    config = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    options = {
        **ENGINE,
        "ec_transfer_config": config
        | {"ec_connector_extra_config": {"shared_storage_path": str(run.folder / "outputs")}},
    }
    with LlmFleet(nursery, model, run.logs) as fleet:
        first, second = fleet.add("files-first", **options), fleet.add("files-second", **options)
        fleet.start()
        return ask(first, pictures), ask(second, pictures)


BENCHMARK = Benchmark(
    name="encoder",
    description="Measures the TTFT of prompts with a picture whose encoder's output is loaded, beside vLLM's own "
    "connectors.",
    measure=measure,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
