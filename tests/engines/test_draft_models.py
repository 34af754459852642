"""Speculative decoding with layers of its own: chunks include the drafter's KV, and answers are those without lmkv.

Two engines for each method, with the same settings: `bare` has no connector. `test_features.py` has n-grams.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkv_client.demo.model import TINY, make_model
from tests.engines.llm import Answers, LlmFleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

LAYER_BYTES = 2 * TINY.kv_head_count * TINY.head_size * 4
"""Of one token in float32."""
PROMPT_TOKENS = 1000
HIT_TOKENS = 768
OUTPUT_TOKENS = 60
FEW = [5, 6, 7]
"""The only tokens that the model rates, so that an EAGLE head with random weights guesses some right."""


def make_target(folder: Path) -> Path:
    """Writes a model that says few different tokens."""
    file = make_model(folder) / "model.safetensors"
    weights = load_file(file)
    rated = torch.zeros_like(weights["lm_head.weight"])
    rated[FEW] = weights["lm_head.weight"][FEW]
    save_file(weights | {"lm_head.weight": rated}, file, metadata={"format": "pt"})
    return folder


def make_eagle(folder: Path, model: Path) -> Path:
    """Writes an EAGLE head: the first layer of the model behind a projection that passes on the hidden state."""
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    prefix = "model.layers.0."
    head = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith(prefix)}
    del head["layers.0.input_layernorm.weight"]
    hidden = torch.eye(TINY.hidden_size, dtype=torch.bfloat16)
    head["fc.weight"] = torch.cat((hidden, hidden), dim=1).contiguous()
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder


@pytest.fixture(scope="module", params=["draft_model", "eagle"])
def method(request: pytest.FixtureRequest) -> str:
    """vLLM's name of the method."""
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, method: str) -> Iterator[LlmFleet]:
    """Both engines, ready. A draft model that is the model itself is always right, if its KV is."""
    folder = tmp_path_factory.mktemp("models")
    model = make_target(folder / "tiny")
    drafter = make_eagle(folder / "eagle", model) if method == "eagle" else model
    speculative = {"method": method, "model": str(drafter), "num_speculative_tokens": 2}
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("bare", transfer_config=None, speculative_config=speculative)
        fleet.add("lmkv", speculative_config=speculative)
        fleet.start()
        yield fleet


def drafts(answers: Answers) -> tuple[float, float]:
    """Drafted tokens, and those among them that were accepted."""
    drafted, accepted = (answers.grown[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    return drafted, accepted


def test_a_hit_has_the_drafters_kv(fleet: LlmFleet, method: str, request: pytest.FixtureRequest) -> None:
    bare, lmkv = (fleet.engines[name] for name in ("bare", "lmkv"))
    prompt = make_prompt(zlib.crc32(request.node.nodeid.encode()), PROMPT_TOKENS)
    expected = bare.ask(prompt, max_tokens=OUTPUT_TOKENS)
    drafted, accepted = drafts(expected)
    assert 0 < accepted < drafted if method == "eagle" else 0 < accepted == drafted
    first = lmkv.ask(prompt, max_tokens=OUTPUT_TOKENS)
    assert (first.token_ids, first.cached_tokens) == (expected.token_ids, 0)
    again = lmkv.ask_again(prompt, max_tokens=OUTPUT_TOKENS)
    assert (again.token_ids, again.loaded_tokens) == (expected.token_ids, HIT_TOKENS)
    layer_count = TINY.layer_count + (1 if method == "eagle" else TINY.layer_count)
    assert again.grown["lmkv:loaded_bytes_total"] == HIT_TOKENS * layer_count * LAYER_BYTES
    assert drafts(first) == drafts(again) == (drafted, accepted), "wrong KV makes other drafts"
