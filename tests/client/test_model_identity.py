"""The identity of KV that engines of several kinds share: what decides, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import ConfigError
from lmkv_client.file_digests import Stamp
from lmkv_client.model_identity import SHARED_FIELDS, WeightsSource, shared_identity

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCALED = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0}


def identity(config: dict[str, Any] | None = None, **named: Any) -> str:
    values: dict[str, Any] = {"model": "hub/llama", "commit": COMMIT, "model_id": "", "kv_dtype": "float32"} | named
    weights = WeightsSource(model=values.pop("model"), commit=values.pop("commit"))
    return shared_identity(config or LLAMA, weights, **values)


def test_the_identity_of_a_model_never_changes() -> None:
    """It is in keys: engines of another version of lmkv would not find what these have stored."""
    assert identity() == "shared:70092cbd2bafcaca44a8ac7047d510ff"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, {"model_type": "qwen2", "hidden_act": "gelu"}.get(name, 8)) for name in SHARED_FIELDS),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 50_000.0}),
        ("rope_parameters", SCALED),
        ("rope_parameters", SCALED | {"factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_what_decides_about_keys_and_values_changes_the_identity(name: str, value: Any) -> None:
    assert identity(LLAMA | {name: value}) != identity()


def test_weights_change_the_identity(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"some")
    some = identity(model=str(tmp_path), commit=None)
    (tmp_path / "model.safetensors").write_bytes(b"more")
    others = [some, identity(model=str(tmp_path), commit=None), identity(commit=COMMIT[::-1]), identity(model="x/y")]
    assert len({*others, identity(), identity(model_id="mine")}) == 6
    assert identity(model_id="mine") == identity(model_id="mine", model="elsewhere", commit=None)


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_version": "9"},
        {"vocab_size": 7},
        {"head_dim": None},
        {"rope_parameters": None, "rope_theta": 10_000},
        {"rope_parameters": None, "rope_scaling": {"type": "default"}},
    ],
)
def test_how_a_version_of_transformers_writes_the_configuration_does_not(change: dict[str, Any]) -> None:
    assert identity(LLAMA | change) == identity()


@pytest.mark.parametrize(
    ("change", "named", "reason"),
    [
        ({"model_type": "cohere"}, {}, "model_type cohere is not known to have the same keys"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope_type dynamic gives tokens keys"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, {}, "rope_type yarn"),
        ({"sliding_window": 4096}, {}, "sliding window"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantized weights"),
        ({}, {"quantization": "awq"}, "quantized weights"),
        ({}, {"kv_dtype": "fp8_e4m3"}, "KV of fp8_e4m3 has scales"),
        ({}, {"commit": None}, "the commit of hub/llama is not known; .*set model_id"),
        ({}, {"commit": "main"}, "the commit of hub/llama is not known"),
        ({}, {"model": "", "commit": None}, "set model_id"),
    ],
)
def test_what_engines_may_not_compute_alike_is_refused(
    change: dict[str, Any], named: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"share_across_engines: .*{reason}") as refused:
        identity(LLAMA | change, **named)
    assert refused.value.metadata == {"key": "share_across_engines"}


def test_weights_of_a_hub_model_are_those_of_its_commit() -> None:
    assert WeightsSource(model="hub/llama", commit=COMMIT).identity() == f"hub/llama@{COMMIT}"


def hub_model(cache: Path, commit: str, revision: str = "main") -> None:
    """What the hub's client leaves of a model in its cache."""
    folder = cache / "models--hub--llama"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)


@pytest.mark.parametrize("commit", [None, "main"])
def test_a_hub_model_of_a_branch_goes_by_the_commit_that_was_downloaded(tmp_path: Path, commit: str | None) -> None:
    downloaded = WeightsSource(model="hub/llama", commit=commit, cache=str(tmp_path))
    with pytest.raises(ConfigError, match=r"the commit of hub/llama is not known, .*set model_id"):
        downloaded.identity()
    hub_model(tmp_path, COMMIT)
    assert downloaded.identity() == f"hub/llama@{COMMIT}"
    hub_model(tmp_path, COMMIT[::-1], "tuned")
    assert replace(downloaded, revision="tuned").identity() == f"hub/llama@{COMMIT[::-1]}"


def test_weights_that_changed_after_the_engine_was_started_are_not_identified(tmp_path: Path) -> None:
    """Which of them the engine has read is not known."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"some")
    written = Stamp.of(weights).ctime_ns / 1e9
    source = WeightsSource(model=str(tmp_path))
    assert replace(source, loaded_after=written + 1).identity() == source.identity()
    with pytest.raises(ConfigError, match=r"model\.safetensors has changed since the engine began to load it"):
        replace(source, loaded_after=written - 1).identity()
