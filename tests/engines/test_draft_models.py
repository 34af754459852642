"""Speculative decoding with layers of its own: chunks include the drafter's KV, and answers are those without lmkv.

Two engines for each method, with the same settings: `bare` has no connector. `test_features.py` has n-grams.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
"""The only tokens that the model rates, so that layers with random weights guess some right."""
MTP_NORMS = ("token", "hidden", "final")


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


def make_eagle3(folder: Path, model: Path) -> Path:
    """Writes an EAGLE-3 head, which sees the hidden states of three layers: the first layer of the model, behind the
    last of these states beside the embedding."""
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    prefix = "model.layers.0."
    head = {"midlayer." + name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)}
    for name in ("q_proj", "k_proj", "v_proj"):
        one = head[f"midlayer.self_attn.{name}.weight"]
        head[f"midlayer.self_attn.{name}.weight"] = torch.cat((one, one), dim=1).contiguous()
    head["midlayer.hidden_norm.weight"] = weights["model.norm.weight"].clone()
    nothing = torch.zeros(TINY.hidden_size, 2 * TINY.hidden_size, dtype=torch.bfloat16)
    head["fc.weight"] = torch.cat((nothing, torch.eye(TINY.hidden_size, dtype=torch.bfloat16)), dim=1).contiguous()
    head |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": TINY.vocab_size}
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_mtp(folder: Path) -> Path:
    """Writes a MiMo, the smallest of the models that predict a second token themselves: Qwen2, and a layer for that."""
    shape = replace(TINY, head_count=TINY.hidden_size // TINY.head_size)
    file = make_model(folder, shape) / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("_proj.weight") and "self_attn" in name]:
        if "o_proj" not in name:
            weights[name.replace(".weight", ".bias")] = torch.zeros(weights[name].shape[0], dtype=torch.bfloat16)
    prefix, mtp = "model.layers.0.", "model.mtp_layers.0."
    weights |= {
        mtp + name.removeprefix(prefix): one.clone() for name, one in weights.items() if name.startswith(prefix)
    }
    weights |= {mtp + f"{norm}_layernorm.weight": weights["model.norm.weight"].clone() for norm in MTP_NORMS}
    hidden = torch.eye(TINY.hidden_size, dtype=torch.bfloat16)
    weights[mtp + "input_proj.weight"] = torch.cat((hidden, hidden), dim=1).contiguous()
    rated = torch.zeros_like(weights["lm_head.weight"])
    rated[FEW] = weights["lm_head.weight"][FEW]
    save_file(weights | {"lm_head.weight": rated}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=["draft_model", "eagle", "eagle3", "mtp"])
def method(request: pytest.FixtureRequest) -> str:
    """vLLM's name of the method."""
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory, method: str) -> Iterator[LlmFleet]:
    """Both engines, ready. A draft model that is the model itself is always right, if its KV is."""
    folder = tmp_path_factory.mktemp("models")
    model = make_mtp(folder / "mtp") if method == "mtp" else make_target(folder / "tiny")
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if method == "mtp" else 2}
    if method != "mtp":
        make_head = {"eagle": make_eagle, "eagle3": make_eagle3}.get(method)
        speculative["model"] = str(make_head(folder / "head", model) if make_head else model)
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("bare", transfer_config=None, speculative_config=speculative)
        fleet.add("lmkv", {"audit_rate": "1"}, speculative_config=speculative)  # which audits no drafter's KV
        fleet.start()
        yield fleet


def drafts(answers: Answers) -> tuple[float, float]:
    """Drafted tokens, and those among them that were accepted."""
    drafted, accepted = (answers.grown[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("draft", "accepted"))
    return drafted, accepted


def test_a_hit_has_the_drafters_kv(fleet: LlmFleet, method: str, seed: int) -> None:
    bare, lmkv = (fleet.engines[name] for name in ("bare", "lmkv"))
    prompt = make_prompt(seed, PROMPT_TOKENS)
    expected = bare.ask(prompt, max_tokens=OUTPUT_TOKENS)
    drafted, accepted = drafts(expected)
    assert 0 < accepted == drafted if method == "draft_model" else 0 < accepted < drafted
    first = lmkv.ask(prompt, max_tokens=OUTPUT_TOKENS)
    assert (first.token_ids, first.cached_tokens) == (expected.token_ids, 0)
    again = lmkv.ask_again(prompt, max_tokens=OUTPUT_TOKENS)
    assert (again.token_ids, again.loaded_tokens) == (expected.token_ids, HIT_TOKENS)
    layer_count = TINY.layer_count + (TINY.layer_count if method == "draft_model" else 1)
    assert again.grown["lmkv:loaded_bytes_total"] == HIT_TOKENS * layer_count * LAYER_BYTES
    assert drafts(first) == drafts(again) == (drafted, accepted), "wrong KV makes other drafts"
