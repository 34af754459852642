"""What a model's KV is identified by, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv_client.transformers.model_kv import LENGTH_DEPENDENT_ROPE, model_kv, new_cache
from tests.client.transformers.conftest import GetModel, make_folder, open_model

CONFIG = ConnectorConfig()
SHARED = replace(CONFIG, share_across_engines=True)


def fingerprint(model: Any, config: ConnectorConfig = CONFIG) -> bytes:
    return model_kv(model, config, "").spec.fingerprint


def test_the_spec_says_what_the_model_keeps(get_model: GetModel, model_folder: Callable[[str], Path]) -> None:
    kv = model_kv(get_model("gemma3"), CONFIG, "")
    spec = kv.spec
    assert (spec.layer_count, spec.kv_head_count, spec.head_size, spec.chunk_size) == (6, 2, 64, 256)
    assert (spec.kv_dtype, kv.dtype, spec.vocab_size, spec.has_plain_parts) == ("float32", torch.float32, 512, True)
    assert spec.model_name == str(model_folder("gemma3"))
    assert spec.model_id.startswith("transformers:")
    assert model_kv(get_model("gemma3"), CONFIG, "mine").spec.model_name == "mine"
    assert kv.devices == (torch.device("cpu"),) * 6


def test_equal_models_have_equal_fingerprints_and_others_have_others(
    model_folder: Callable[[str], Path], get_model: GetModel
) -> None:
    first = fingerprint(get_model("llama"))
    model = open_model(model_folder("llama"))
    assert fingerprint(model) == first
    assert fingerprint(model.to(torch.bfloat16)) != first
    model = open_model(model_folder("llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.001)
    assert fingerprint(model) != first, "weights count as they are in memory"
    model = open_model(model_folder("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight[123, 45] += 1
    assert fingerprint(model) != first, "each element counts"
    model = open_model(model_folder("llama"))
    model.config.rope_parameters["rope_theta"] = 50_000.0
    assert fingerprint(model) != first
    assert fingerprint(get_model("llama"), replace(CONFIG, chunk_size=64)) != first
    assert fingerprint(get_model("llama"), replace(CONFIG, model_id="named by hand")) != first


def test_an_identity_that_is_set_is_still_that_of_transformers(get_model: GetModel) -> None:
    """An engine of another kind may have the same `model_id`."""
    spec = model_kv(get_model("llama"), replace(CONFIG, model_id="llama@7"), "").spec
    assert spec.model_id.startswith("transformers:")


def test_the_key_changes_the_fingerprint(get_model: GetModel) -> None:
    """An engine that does not set it reads nothing of those that do."""
    spec = model_kv(get_model("llama"), SHARED, "").spec
    assert spec.model_id.startswith("shared:")
    assert spec.fingerprint != fingerprint(get_model("llama"))


def test_a_model_with_windows_is_not_shared(get_model: GetModel) -> None:
    with pytest.raises(ConfigError, match="share_across_engines: model_type gemma2 is not known"):
        model_kv(get_model("gemma2"), SHARED, "")


def test_a_model_without_files_is_shared_by_a_name_only(
    get_model: GetModel, model_folder: Callable[[str], Path]
) -> None:
    model = open_model(model_folder("llama"))
    model.config.name_or_path = ""
    with pytest.raises(ConfigError, match=r"share_across_engines: .*set model_id"):
        model_kv(model, SHARED, "")
    assert model_kv(model, replace(SHARED, model_id="mine"), "").spec.model_id.startswith("shared:")


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_layers_without_keys_of_each_token_are_refused(tmp_path: Path, name: str) -> None:
    model = open_model(make_folder(tmp_path / name, name))
    with pytest.raises(ConfigError, match="keep no key and value of each token: LinearAttentionLayer; use the model"):
        model_kv(model, CONFIG, "")


def test_what_kv_depends_on_besides_tokens_is_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(model_folder("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(model, "peft_config", {"default": SimpleNamespace()}, raising=False)
        with pytest.raises(ConfigError, match="LlamaForCausalLM has adapters"):
            model_kv(model, CONFIG, "")
    with monkeypatch.context() as patch:
        patch.setattr(model.generation_config, "cache_implementation", "static")
        with pytest.raises(ConfigError, match=r"set model\.generation_config\.cache_implementation to None"):
            model_kv(model, CONFIG, "")


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    """As of embedding models that were made of decoders: one configuration, with or without it."""
    model = open_model(make_folder(tmp_path / "both", "gemma3", use_bidirectional_attention=True))
    with pytest.raises(ConfigError, match="keys and values in Gemma3ForCausalLM depend on later tokens; use the model"):
        model_kv(model, CONFIG, "")


@pytest.mark.parametrize("kind", sorted(LENGTH_DEPENDENT_ROPE))
def test_keys_that_depend_on_the_length_of_the_prompt_are_refused(get_model: GetModel, kind: str) -> None:
    folder_config = get_model("llama").config.to_dict()
    half = folder_config["head_dim"] // 2
    factors: dict[str, dict[str, Any]] = {
        "longrope": {"short_factor": [1.0] * half, "long_factor": [2.0] * half},
        "dynamic": {"factor": 2.0},
    }
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "original_max_position_embeddings": 64, **factors[kind]}
    config = AutoConfig.for_model(**(folder_config | {"rope_parameters": rope, "max_position_embeddings": 64}))
    model = AutoModelForCausalLM.from_config(config).eval()
    short, long = (_first_keys(model, count) for count in (32, 256))
    assert not torch.allclose(short, long, atol=1e-3), "what is refused differs"
    with pytest.raises(ConfigError, match=f"rope_type {kind}, by which a token's keys depend on the length"):
        model_kv(model, CONFIG, "")


def _first_keys(model: Any, token_count: int) -> torch.Tensor:
    """Keys of the first tokens of a prompt in the first layer."""
    past = new_cache(model)
    with torch.no_grad():
        model(input_ids=torch.full((1, token_count), 7), past_key_values=past, use_cache=True, logits_to_keep=1)
    keys: torch.Tensor = past.layers[0].keys[:, :, :32]
    return keys


def test_a_model_with_an_encoder_is_refused() -> None:
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ConfigError, match="has an encoder"):
        model_kv(AutoModelForSeq2SeqLM.from_config(config), CONFIG, "")


def test_weights_that_are_elsewhere_need_a_name(get_model: GetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_model("llama")
    state = model.state_dict() | {"lm_head.weight": torch.empty(2, device="meta")}
    monkeypatch.setattr(model, "state_dict", lambda: state)
    with pytest.raises(ConfigError, match=r"lm_head.weight is not in memory; set model_id"):
        model_kv(model, CONFIG, "")
    assert model_kv(model, replace(CONFIG, model_id="mine"), "").spec.model_id
