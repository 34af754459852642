"""Real engines at a node whose disk has a codec: rounded chunks are loaded by the engine that accepts them alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lmkv.config import NodeConfig
from lmkv.tiers import DISK
from lmkv.v1.registry_service_pb2 import TierUsage
from tests.engines.faults import eventually
from tests.engines.llm import LlmFleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

NAME = "rounded"
PROMPT_TOKENS = 2000
HELD_CHUNKS = PROMPT_TOKENS // 256
HELD_TOKENS = 256 * HELD_CHUNKS
POOL_CHUNKS = 24
CHUNK_BYTES = 1 << 20


@pytest.fixture(scope="module")
def smooth_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with smaller queries: it attends to all tokens alike, so that small errors stay small."""
    folder = tmp_path_factory.mktemp("models") / "smooth"
    shutil.copytree(tiny_model, folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        save_file({name: each * (0.05 if "q_proj" in name else 1) for name, each in weights.items()}, file)
    return folder


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, smooth_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """An engine that accepts rounded chunks, one that does not at the same node, and a coordinator, ready."""
    folder = tmp_path_factory.mktemp("disk")
    with LlmFleet(nursery, smooth_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        disk = {"local_cpu": "false", "local_disk": str(folder), "max_local_disk_size": "1GB"}
        pool = {"max_local_cpu_size": f"{POOL_CHUNKS * CHUNK_BYTES}B"}
        fleet.add(NAME, disk | pool | {"local_disk_codec": "int8", "accept_lossy": "true"})
        fleet.start()
        node = NodeConfig(instance_id=NAME, runtime_dir=str(fleet.runtime_dir))
        fleet.add("exact", {"node_address": str(node.engine_socket)})
        fleet.start()
        yield fleet


def usage(fleet: LlmFleet) -> TierUsage:
    """What is on the node's disk."""
    return next(usage for usage in fleet.coordinator.instances()[NAME].tiers if usage.tier == DISK)


def is_on_disk(fleet: LlmFleet, chunk_count: int) -> bool:
    """Whether the disk has this many chunks."""
    return usage(fleet).chunk_count >= chunk_count


def test_rounded_chunks_are_hits_for_the_engine_that_accepts_them_and_misses_for_the_other(fleet: LlmFleet) -> None:
    rounded, exact = fleet.engines[NAME], fleet.engines["exact"]
    prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(5)]
    expected = rounded.ask(prompts[0], logprobs=0)
    for count, prompt in enumerate(prompts[1:], start=2):
        rounded.ask(prompt)
        eventually(partial(is_on_disk, fleet, count * HELD_CHUNKS), "the prompt is on disk")
    assert usage(fleet).used_bytes < 0.6 * usage(fleet).chunk_count * CHUNK_BYTES

    again = rounded.ask_again(prompts[0], logprobs=0)
    assert again.loaded_tokens == again.grown['lmkv:tier_tokens_total{tier="disk"}'] == HELD_TOKENS
    assert again.token_ids[0][:4] == expected.token_ids[0][:4]
    assert again.answers[0].logprobs[:4] == pytest.approx(expected.answers[0].logprobs[:4], abs=0.02)
    assert again.answers[0].logprobs[:4] != expected.answers[0].logprobs[:4], "they are rounded"

    other = exact.ask(prompts[0])
    assert (other.loaded_tokens, other.token_ids) == (0, expected.token_ids)
    assert exact.ask_again(prompts[0]).loaded_tokens == HELD_TOKENS, "it stores and loads chunks of its own"
    assert exact.ask_again(prompts[0]).token_ids == expected.token_ids
