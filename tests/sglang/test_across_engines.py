"""KV goes between SGLang, vLLM and transformers if all set `share_across_engines`, in float32 with the same tokens.

SGLang and vLLM have a node each; what one has computed goes to the other one's node. vLLM runs in the environment below
this one, which has the versions of packages that it needs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lmkv.config import ConnectorConfig, load
from lmkv_client.demo.engine import EngineProcess
from tests.sglang.conftest import Fleet, open_fleet
from tests.sglang.engine import ANSWER_TOKENS, ENVIRONMENT, PAGE_SIZE, SglangProcess
from tests.sglang.prompts import STORED_TOKENS, make_prompt

VLLM_PYTHON = Path(__file__).parents[2] / ".venv/bin/python"
SHARING = {"share_across_engines": "true", "hash_scheme": "sha256-pages", "chunk_size": str(PAGE_SIZE)}
SETTINGS = {f"LMKV_{name.upper()}": value for name, value in SHARING.items()}

Generate = Callable[[list[int]], tuple[tuple[int, ...], int]]
"""What transformers answers to a prompt, and how many of its tokens it has loaded."""


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of its own: lookups by tokens need one spec."""
    with open_fleet(model, tmp_path_factory.mktemp("sharing")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def sglang(fleet: Fleet) -> Iterator[SglangProcess]:
    with fleet.engine("sharing-sglang", settings=SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def vllm(fleet: Fleet, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A vLLM engine that shares."""
    own = {name: value for name, value in ENVIRONMENT.items() if name.startswith("LMKV_")} | SETTINGS
    engine = EngineProcess(
        model,
        tmp_path_factory.mktemp("vllm"),
        name="sharing-vllm",
        python=str(VLLM_PYTHON),
        context_tokens=2048,
        environment=own
        | {
            "LMKV_INSTANCE_ID": "sharing-vllm",
            "LMKV_RUNTIME_DIR": str(fleet.folder),
            "LMKV_COORDINATOR_ADDRESS": fleet.coordinator.address,
        },
    )
    with engine:
        yield engine


@pytest.fixture
def generate(fleet: Fleet, sglang: SglangProcess, model: Path) -> Iterator[Generate]:
    """Has transformers answer, in this process, at SGLang's node."""
    assert sglang.is_ready()
    with warnings.catch_warnings(action="ignore"):
        from transformers import AutoModelForCausalLM

        from lmkv_client.transformers import LmkvCache
    socket = fleet.folder / "sharing-sglang" / "engine.sock"
    waits = {"lookup_timeout": "5", "load_timeout": "10"}
    config = load(ConnectorConfig, flags=SHARING | waits | {"node_address": str(socket)}, env={})
    computing = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with LmkvCache(computing, config=config) as cache:

        def generate(prompt: list[int]) -> tuple[tuple[int, ...], int]:
            ids = torch.tensor([prompt])
            before = cache.statistics.loaded_tokens
            output = cache.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            return tuple(output[0].tolist()[len(prompt) :]), cache.statistics.loaded_tokens - before

        yield generate


def test_sglang_continues_what_vllm_has_computed(
    fleet: Fleet, alone: SglangProcess, vllm: EngineProcess, sglang: SglangProcess
) -> None:
    prompt = make_prompt(31)
    expected = alone.answer(prompt).token_ids
    assert vllm.complete(prompt, ANSWER_TOKENS).token_ids == expected
    fleet.wait_stored(prompt, "sharing-vllm")
    answer = sglang.answer(prompt)
    assert (answer.token_ids, answer.cached_tokens) == (expected, STORED_TOKENS)


def test_vllm_continues_what_sglang_has_computed(
    fleet: Fleet, alone: SglangProcess, vllm: EngineProcess, sglang: SglangProcess
) -> None:
    prompt = make_prompt(32)
    assert sglang.answer(prompt).cached_tokens == 0
    fleet.wait_stored(prompt, "sharing-sglang")
    longer = [*prompt, *make_prompt(33, 100)]
    continued = vllm.complete(longer, ANSWER_TOKENS)
    assert continued.cached_tokens == STORED_TOKENS
    assert continued.token_ids == alone.answer(longer).token_ids


def test_transformers_continues_what_sglang_has_computed(
    fleet: Fleet, alone: SglangProcess, sglang: SglangProcess, generate: Generate
) -> None:
    prompt = make_prompt(34)
    sglang.answer(prompt)
    fleet.wait_stored(prompt, "sharing-sglang")
    assert generate(prompt) == (alone.answer(prompt).token_ids, STORED_TOKENS)


def test_sglang_continues_what_transformers_has_computed(
    fleet: Fleet, alone: SglangProcess, sglang: SglangProcess, generate: Generate
) -> None:
    prompt = make_prompt(36)
    expected = alone.answer(prompt).token_ids
    assert generate(prompt) == (expected, 0)
    fleet.wait_stored(prompt, "sharing-sglang")
    answer = sglang.answer(prompt)
    assert (answer.token_ids, answer.cached_tokens) == (expected, STORED_TOKENS)
