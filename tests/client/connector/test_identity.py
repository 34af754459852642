"""What decides whether two engines' KV is interchangeable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from lmkv.config import ConnectorConfig
from lmkv.errors import BadKvSpec, ConfigError
from lmkv.spec import NATIVE_TILES, TOKEN_MAJOR, KvSpec
from lmkv_client.connector.identity import (
    SAMPLE_BYTES,
    HeadShare,
    attention_isa,
    folder_digest,
    kv_dtype,
    kv_spec,
    lora_identity,
    model_identity,
    served_names,
)
from lmkv_client.connector.worker.format import check_packing
from lmkv_client.demo.model import make_model
from lmkv_kernels import token_rows
from tests.client.connector.conftest import make_vllm_config

LAYERS = 4


@pytest.fixture(scope="module")
def tiny_config(tiny_model: Path) -> VllmConfig:
    """vLLM's configuration for the tiny model."""
    return make_vllm_config(tiny_model)


def cache_config(*, block_size: int = 32, dtype: torch.dtype = torch.bfloat16, groups: int = 1) -> KVCacheConfig:
    cache = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=dtype)
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, cache) for _ in range(groups)]
    )


def spec_of(config: VllmConfig, caches: KVCacheConfig | None = None, **settings: Any) -> KvSpec:
    return kv_spec(config, caches or cache_config(), ConnectorConfig(**settings))


def test_the_spec_says_what_the_engine_is_made_of(tiny_config: VllmConfig, tiny_model: Path) -> None:
    spec = spec_of(tiny_config)
    assert (spec.layer_count, spec.kv_head_count, spec.head_size, spec.chunk_size) == (LAYERS, 2, 64, 256)
    assert (spec.kv_dtype, spec.mla, spec.format, spec.block_size) == ("bfloat16", False, NATIVE_TILES, 32)
    assert (spec.tile_backend, spec.vocab_size) == ("CPU_ATTN", 512)
    assert spec.tile_isa
    assert spec.model_name == str(tiny_model)
    assert spec == spec_of(tiny_config)


def test_a_copy_of_the_model_elsewhere_has_the_same_fingerprint(
    tiny_config: VllmConfig, tiny_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    other = spec_of(make_vllm_config(copy, served_model_name="another-name"))
    assert other.model_name == "another-name"
    assert other.fingerprint == spec_of(tiny_config).fingerprint


def test_other_weights_have_another_fingerprint(tiny_config: VllmConfig, tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = make_model(tmp_path / "seeded", seed=1) / "model.safetensors"
    shutil.copy(weights, other / "model.safetensors")
    assert (other / "config.json").read_text() == (tiny_model / "config.json").read_text()
    assert spec_of(make_vllm_config(other)).fingerprint != spec_of(tiny_config).fingerprint


def test_another_rope_has_another_fingerprint(tiny_config: VllmConfig, tiny_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 50_000.0
    (other / "config.json").write_text(json.dumps(config))
    assert spec_of(make_vllm_config(other)).fingerprint != spec_of(tiny_config).fingerprint


@pytest.mark.parametrize(
    ("caches", "settings"),
    [
        (cache_config(block_size=64), {}),
        (cache_config(dtype=torch.float32), {}),
        (cache_config(), {"chunk_size": 128}),
        (cache_config(), {"model_id": "named by hand"}),
    ],
)
def test_another_page_layout_or_configuration_has_another_fingerprint(
    tiny_config: VllmConfig, caches: KVCacheConfig, settings: dict[str, Any]
) -> None:
    assert spec_of(tiny_config, caches, **settings).fingerprint != spec_of(tiny_config).fingerprint


def test_another_draft_model_has_another_fingerprint_and_n_grams_do_not(
    tiny_config: VllmConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """A draft model's layers are cached with the model's own: what one engine drafts by is in its chunks."""

    def drafting_by(**speculative: Any) -> bytes:
        return spec_of(
            make_vllm_config(tiny_model, speculative_config={"num_speculative_tokens": 2} | speculative)
        ).fingerprint

    plain = spec_of(tiny_config).fingerprint
    assert drafting_by(method="ngram", prompt_lookup_max=2) == plain
    others = [make_model(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    drafts = {drafting_by(method="draft_model", model=str(model)) for model in others}
    assert len(drafts | {plain}) == 3


def test_what_the_operator_names_is_the_identity_of_the_weights(tiny_config: VllmConfig) -> None:
    assert spec_of(tiny_config, model_id="llama@7").model_id == "llama@7"


def test_all_names_of_a_model_are_known_the_first_of_them_first(tiny_model: Path) -> None:
    assert served_names(make_vllm_config(tiny_model, served_model_name=["one", "two"]).model_config) == ["one", "two"]
    assert served_names(make_vllm_config(tiny_model, served_model_name="one").model_config) == ["one"]
    assert served_names(make_vllm_config(tiny_model).model_config) == [str(tiny_model)]


def test_a_chunk_size_that_is_no_multiple_of_the_block_size_is_refused(tiny_config: VllmConfig) -> None:
    with pytest.raises(BadKvSpec, match=r"chunk_size 100 .* block size 32"):
        spec_of(tiny_config, chunk_size=100)


def test_a_hybrid_model_is_refused_in_one_line(tiny_config: VllmConfig) -> None:
    with pytest.raises(ConfigError, match="KV-cache groups: the model has 2"):
        spec_of(tiny_config, cache_config(groups=2))


SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("cache", "advice"),
    [
        (
            kinds.SlidingWindowSpec(sliding_window=1024, **SHAPE),
            "add --disable-sliding-window, which limits max_model_len to the window of 1024 tokens",
        ),
        (kinds.SlidingWindowMLASpec(sliding_window=1024, **SHAPE), "remove --kv-transfer-config"),
        (kinds.RSWASpec(rswa_window=1024, **SHAPE), "remove --kv-transfer-config"),
        (kinds.SinkFullAttentionSpec(sink_len=32, **SHAPE), "remove --kv-transfer-config"),
        (kinds.HiddenStateCacheSpec(**SHAPE), "remove --kv-transfer-config"),
        (kinds.ChunkedLocalAttentionSpec(attention_chunk_size=128, **SHAPE), "remove --kv-transfer-config"),
        (kinds.CrossAttentionSpec(**SHAPE), "remove --kv-transfer-config"),
        (kinds.EncoderOnlyAttentionSpec(**SHAPE), "remove --kv-transfer-config"),
        (kinds.MambaSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,)), "remove --kv-transfer-config"),
        (
            kinds.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer": FullAttentionSpec(**SHAPE)}),
            "remove --kv-transfer-config",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_a_model_whose_only_cache_is_not_full_attention_is_refused_in_one_line(
    tiny_config: VllmConfig, tiny_model: Path, cache: KVCacheSpec, advice: str
) -> None:
    """Subclasses of the full-attention spec as well: vLLM frees pages of theirs while a request runs."""
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], cache)])
    with pytest.raises(ConfigError) as refused:
        spec_of(tiny_config, config)
    line = str(refused.value)
    assert f"model {tiny_model} has a KV cache of kind {type(cache).__name__}, " in line
    assert advice in line
    assert "\n" not in line


def test_full_attention_with_windows_in_its_computation_is_served(tiny_config: VllmConfig) -> None:
    """What vLLM makes of sliding layers beside full ones: pages of all tokens, and a mask."""
    cache = FullAttentionSpec(sliding_window=128, **SHAPE)
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], cache)])
    assert spec_of(tiny_config, config).head_size == 64


@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_tokens_that_are_spread_over_ranks_are_refused_in_one_line(
    tiny_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(tiny_config.parallel_config, f"{what}_context_parallel_size", 2)
    with pytest.raises(ConfigError, match=f"{what}_context_parallel_size.*supports 1"):
        spec_of(tiny_config)


def test_heads_that_cannot_be_split_are_refused_in_one_line(
    tiny_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_config.parallel_config, "tensor_parallel_size", 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 2 KV heads cannot be split evenly over 3 ranks"):
        spec_of(tiny_config)
    monkeypatch.setattr(tiny_config.parallel_config, "tensor_parallel_size", 4)
    assert spec_of(tiny_config).kv_head_count == 2


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


def test_token_major_chunks_do_not_depend_on_the_block_size(tiny_config: VllmConfig) -> None:
    specs = [
        spec_of(tiny_config, cache_config(block_size=size), kv_format="token_major", chunk_size=100)
        for size in (32, 64)
    ]
    assert specs[0] == specs[1]
    assert (specs[0].format, specs[0].block_size, specs[0].tile_isa) == (TOKEN_MAJOR, 0, "")
    assert specs[0].fingerprint != spec_of(tiny_config).fingerprint
    assert spec_of(tiny_config, kv_format="native") == spec_of(tiny_config)


def test_on_a_gpu_chunks_are_token_major(tiny_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_config.device_config, "device_type", "cuda")
    assert spec_of(tiny_config, cache_config(block_size=16)).format == TOKEN_MAJOR
    with pytest.raises(ConfigError, match="native tiles are for CPUs; use token_major"):
        spec_of(tiny_config, kv_format="native")
    monkeypatch.setattr(tiny_config.device_config, "device_type", "xpu")
    with pytest.raises(ConfigError, match="KV cache on xpu cannot be moved"):
        spec_of(tiny_config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("block_size", "head_size"), [(32, 64), (128, 32), (64, 80)])
def test_how_this_machines_attention_packs_a_block_is_known(
    tiny_config: VllmConfig, dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    cache = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=head_size, dtype=dtype)
    check_packing(attention_isa(tiny_config, head_size, block_size), cache)


def test_a_packing_that_is_not_as_expected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"kv_format: .*'mmx'.*use kv_format native"):
        check_packing("mmx", cache)
    monkeypatch.setattr("lmkv_client.connector.worker.format.packed_rows", token_rows)  # as if keys were not turned
    with pytest.raises(ConfigError, match=r"not where they should be.*use kv_format native"):
        check_packing("vec", cache)


@pytest.mark.parametrize(
    ("cache_dtype", "element", "name"),
    [
        ("auto", "torch.bfloat16", "bfloat16"),
        ("auto", "torch.float32", "float32"),
        ("fp8", "torch.uint8", "fp8_e4m3"),
        ("fp8_e4m3", "torch.uint8", "fp8_e4m3"),
        ("fp8_e5m2", "torch.uint8", "fp8_e5m2"),
        ("float16", "torch.float16", "float16"),
    ],
)
def test_element_types_have_lmkvs_names(cache_dtype: str, element: str, name: str) -> None:
    assert kv_dtype(cache_dtype, element) == name


def test_the_identity_does_not_depend_on_where_the_model_is(tiny_config: VllmConfig, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_config.model_config.model, tmp_path / "copy")
    assert model_identity(make_vllm_config(copy).model_config) == model_identity(tiny_config.model_config)


# ---- digests of folders


def weights(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_bytes(content)
    return folder


LARGE = bytes(range(256)) * (16 * SAMPLE_BYTES // 256)

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
        flip(len(LARGE) // 2),
        flip(len(LARGE) - 1),
        lambda folder: (folder / "model.safetensors").write_bytes(LARGE + b"1"),
        lambda folder: (folder / "extra.safetensors").write_bytes(b"1"),
        lambda folder: (folder / "model.safetensors").rename(folder / "renamed.safetensors"),
        lambda folder: (folder / "model.safetensors").unlink(),
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


def test_two_adapters_of_one_name_are_not_the_same(tmp_path: Path) -> None:
    one = weights(tmp_path / "one", adapter_safetensors=b"1")
    same = weights(tmp_path / "same", adapter_safetensors=b"1")
    two = weights(tmp_path / "two", adapter_safetensors=b"2")
    names = [lora_identity(LoRARequest("adapter", 1, str(folder))) for folder in (one, same, two)]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("adapter@") for name in names)


def test_adapters_of_other_names_are_not_the_same(tmp_path: Path) -> None:
    folder = str(weights(tmp_path / "one", adapter_safetensors=b"1"))
    assert lora_identity(LoRARequest("a", 1, folder)) != lora_identity(LoRARequest("b", 1, folder))


def test_an_adapter_from_a_hub_goes_by_its_path() -> None:
    names = {lora_identity(LoRARequest("a", 1, path)) for path in ("org/one", "org/two")}
    assert len(names) == 2


def test_an_adapter_that_was_replaced_in_place_is_another(tmp_path: Path) -> None:
    folder = weights(tmp_path / "one", adapter_safetensors=b"1")
    before = lora_identity(LoRARequest("a", 1, str(folder)))
    (folder / "adapter.safetensors").write_bytes(b"22")
    assert lora_identity(LoRARequest("a", 1, str(folder))) != before
