"""What identifies an engine's weights and names, and which heads each rank has."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import MultiModalConfig

from lmkv.errors import ConfigError
from lmkv_client.connector.identity import (
    AITER,
    ENCODED_BY,
    OPTIONS,
    VARIABLES,
    HeadShare,
    engine_identity,
    identity_across_engines,
    served_names,
)
from lmkv_client.file_digests import READ_BYTES
from lmkv_client.model_identity import folder_digest
from lmkv_client.plugin import CONFIGURED_AT
from tests.client.connector.conftest import make_vllm_config


def test_all_names_of_a_model_are_known_the_first_of_them_first(tiny_model: Path) -> None:
    assert served_names(make_vllm_config(tiny_model, served_model_name=["one", "two"]).model_config) == ["one", "two"]
    assert served_names(make_vllm_config(tiny_model, served_model_name="one").model_config) == ["one"]
    assert served_names(make_vllm_config(tiny_model).model_config) == [str(tiny_model)]


@pytest.mark.parametrize(
    ("ranks", "heads", "shares"),
    [
        (1, 8, [(0, True)]),
        (2, 8, [(0, True), (4, True)]),
        (4, 2, [(0, True), (0, False), (1, True), (1, False)]),
        (2, 1, [(0, True), (0, False)]),
    ],
    ids=["one rank", "two ranks", "more ranks than heads", "one latent for all"],
)
def test_every_rank_has_its_heads_and_each_head_one_rank_that_stores_it(
    ranks: int, heads: int, shares: list[tuple[int, bool]]
) -> None:
    found = [HeadShare.of_rank(rank, ranks, heads) for rank in range(ranks)]
    assert [(share.first_head, share.is_writer) for share in found] == shares


def test_the_identity_of_a_model_never_changes(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in keys: after an update, engines would not find what they have stored before."""
    config = make_vllm_config(tiny_model)
    monkeypatch.setattr(
        type(config.model_config.hf_config), "to_dict", lambda self: {"hidden_size": 64, "_name_or_path": "here"}
    )
    assert engine_identity(config) == "b39bcf81a2282464c327c19e2af3ddfa"


def test_the_identity_does_not_depend_on_where_the_model_is(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    first, second = (engine_identity(make_vllm_config(folder)) for folder in (tiny_model, copy))
    assert first == second


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("code_revision", "1" * 40),
        ("disable_sliding_window", True),
        ("model_class_overrides", {"LlamaForCausalLM": "mine:Model"}),
        ("model_impl", "transformers"),
        ("quantization_config", {"linear": "fp8"}),
        ("multimodal_config", MultiModalConfig(video_pruning_rate=0.5)),
    ],
)
def test_what_else_decides_how_weights_compute_is_part_of_the_identity(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    config = make_vllm_config(tiny_model)
    before = engine_identity(config)
    monkeypatch.setattr(config.model_config, name, value)
    assert engine_identity(config) != before


CHANGED = {
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_FLOAT32_MATMUL_PRECISION": "medium",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": "0",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "VLLM_ROCM_USE_AITER_FP4BMM": "0",
    "VLLM_ROCM_USE_AITER_FP8BMM": "0",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "a16w4",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
}
"""Values of variables for which `1` is none, or nothing new."""


@pytest.mark.parametrize("name", [name for name in VARIABLES if name in envs.environment_variables])
def test_variables_that_change_what_is_computed_are_part_of_the_identity(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name.startswith(f"{AITER}_"):
        monkeypatch.setenv(AITER, "1")  # without it they have no effect
    changed = CHANGED.get(name, "1")
    if changed == "0":
        monkeypatch.setenv(name, "1")  # which is not what all versions of vLLM do by themselves
    config = make_vllm_config(tiny_model)
    before = engine_identity(config)
    monkeypatch.setenv(name, changed)
    assert engine_identity(config) != before
    with pytest.raises(ConfigError, match=f"share_across_engines: other engines do not compute with .*{name}="):
        identity_across_engines(config, kv_dtype="float32", model_id="llama@7")


@pytest.mark.parametrize(
    ("attribute", "name"), [(attribute, name) for attribute, options in OPTIONS.items() for name in options]
)
def test_options_that_change_what_is_computed_are_part_of_the_identity(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, name: str
) -> None:
    config = make_vllm_config(tiny_model)
    before = engine_identity(config)
    monkeypatch.setattr(getattr(config, attribute), name, "fp8" if name == "indexer_kv_dtype" else True)
    assert engine_identity(config) != before


def test_weights_of_modelscope_are_not_those_of_that_name_at_hugging_face(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_vllm_config(tiny_model)
    before = engine_identity(config)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert engine_identity(config) == before, "a folder is what it is"
    monkeypatch.setattr(config.model_config, "model", "organization/model")
    monkeypatch.setattr(config.model_config.hf_config, "_commit_hash", "1" * 40, raising=False)
    with pytest.raises(ConfigError, match=r"organization/model are ModelScope's.*: set model_id"):
        engine_identity(config)


def test_scales_of_an_encoder_in_a_file_of_their_own_need_a_name(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_vllm_config(tiny_model)
    media = SimpleNamespace(**dict.fromkeys(ENCODED_BY), mm_encoder_fp8_scale_path="/scales.json")
    monkeypatch.setattr(config.model_config, "multimodal_config", media)
    with pytest.raises(ConfigError, match=r"mm_encoder_fp8_scale_path is /scales\.json"):
        engine_identity(config)


@pytest.mark.parametrize(
    ("rope", "count"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1),
        ({"rope_type": "llama3", "rope_theta": 1e4}, 1),
        ({"rope_type": "longrope", "rope_theta": 1e4}, 2),
        ({"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "of a later version"}}, 2),
    ],
)
def test_the_longest_prompt_is_part_of_the_identity_where_rotary_factors_depend_on_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, rope: dict[str, object], count: int
) -> None:
    config, found = make_vllm_config(tiny_model), set()
    monkeypatch.setattr(config.model_config, "hf_text_config", SimpleNamespace(rope_parameters=rope))
    for length in (1024, 2048):
        monkeypatch.setattr(config.model_config, "max_model_len", length)
        found.add(engine_identity(config))
    assert len(found) == count


def test_the_dtype_that_the_engine_computes_in_is_part_of_the_identity(tiny_model: Path) -> None:
    """KV of 8-bit floats has the same dtype whatever it was computed in."""
    dtypes = ("bfloat16", "float16", "float32")
    assert len({engine_identity(make_vllm_config(tiny_model, dtype=dtype)) for dtype in dtypes}) == 3


@pytest.mark.parametrize(
    ("changed", "values", "reason"),
    [
        ("load_config", {"load_format": "dummy"}, "load_format is dummy"),
        ("load_config", {"load_format": "tensorizer"}, "load_format is tensorizer"),
        ("load_config", {"load_format": "of-a-plugin"}, "load_format is of-a-plugin"),
        (
            "load_config",
            {"model_loader_extra_config": {"pattern": "rank-{rank}"}},
            "model_loader_extra_config is .*rank",
        ),
        ("model_config", {"model_weights": "s3://models/base"}, "the weights are at s3://models/base"),
        ("model_config", {"model": "gs://models/base"}, "the weights are at gs://models/base"),
        (
            "model_config",
            {"model": "organization/not-in-the-cache"},
            "the commit of organization/not-in-the-cache is not",
        ),
    ],
)
def test_weights_that_are_elsewhere_need_a_name(
    tiny_model: Path, changed: str, values: dict[str, Any], reason: str
) -> None:
    config = make_vllm_config(tiny_model)
    engine_identity(config)
    for name, value in values.items():
        setattr(getattr(config, changed), name, value)
    with pytest.raises(ConfigError, match=f"{reason}.*: set model_id to a name of these weights"):
        engine_identity(config)
    with pytest.raises(ConfigError, match="set model_id"):
        identity_across_engines(config, kv_dtype="float32", model_id="")
    assert identity_across_engines(config, kv_dtype="float32", model_id="llama@7")


def test_options_of_loaders_that_only_decide_how_files_are_read_are_allowed(tiny_model: Path) -> None:
    config = make_vllm_config(tiny_model)
    plain = engine_identity(config)
    config.load_config.model_loader_extra_config = {"enable_multithread_load": True, "num_threads": 2}
    config.load_config.load_format = "runai_streamer"
    assert engine_identity(config) == plain


def test_weights_that_changed_after_the_engine_was_configured_are_not_identified(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Which of them the engine has read is not known."""
    config = make_vllm_config(shutil.copytree(tiny_model, tmp_path / "copy"))
    assert engine_identity(config)
    setattr(config.model_config, CONFIGURED_AT, time.time() - 3600)
    with pytest.raises(ConfigError, match=r"model\.safetensors has changed since the engine began to load it"):
        engine_identity(config)


def test_a_folder_without_weights_needs_a_name(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="has no weights"):
        folder_digest(tmp_path)


# ---- digests of folders


def weights(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_bytes(content)
    return folder


LARGE = bytes(range(256)) * (2 * READ_BYTES // 256)

Change = Callable[[Path], object]


def flip(at: int) -> Change:
    def change(folder: Path) -> None:
        content = bytearray(LARGE)
        content[at] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    return change


def test_equal_folders_have_equal_digests(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", model_safetensors=LARGE, config_json=b"{}")
    two = weights(tmp_path / "two", model_safetensors=LARGE, config_json=b"other")
    assert folder_digest(one) == folder_digest(two), "only weights count here"


@pytest.mark.parametrize(
    "change",
    [
        flip(0),
        *(flip(at) for at in range(1, len(LARGE), len(LARGE) // 5)),
        flip(len(LARGE) - 1),
        lambda folder: (folder / "model.safetensors").write_bytes(LARGE + b"1"),
        lambda folder: (folder / "extra.safetensors").write_bytes(b"1"),
        lambda folder: (folder / "model.safetensors").rename(folder / "renamed.safetensors"),
        lambda folder: (folder / "modeling_own.py").write_text("scale = 2"),
        lambda folder: (folder / "hf_quant_config.json").write_text("{}"),
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    ],
)
def test_folders_that_differ_have_different_digests(tmp_path: Path, change: Change) -> None:
    one = weights(tmp_path / "one", model_safetensors=LARGE)
    two = weights(tmp_path / "two", model_safetensors=LARGE)
    change(two)
    assert folder_digest(one) != folder_digest(two)


def test_an_empty_weight_file_has_a_digest(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", model_safetensors=b"")
    two = weights(tmp_path / "two", model_safetensors=b"1")
    assert folder_digest(one) != folder_digest(two)
