"""The spec and the groups of an engine, from vLLM's configuration."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from vllm.config import PoolerConfig, VllmConfig
from vllm.config.cache import CacheDType
from vllm.config.pooler import SequencePoolingType
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    get_kv_quant_mode,
)

from lmkv.config import ConnectorConfig
from lmkv.errors import BadKvSpec, ConfigError
from lmkv.keys import HASH_SCHEME, MEDIA_HASH_SCHEME, PAGE_HASH_SCHEME
from lmkv.spec import DTYPE_BYTES, NATIVE_TILES, TOKEN_MAJOR, KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE
from lmkv_client.connector.engine_kv import (
    PER_TENSOR_DTYPES,
    PLAIN_DTYPES,
    LayerGroup,
    check_elements,
    check_reuse,
    engine_kv,
    kv_dtype,
)
from lmkv_client.connector.vllm_api import VLLM_VERSION, attention_isa
from lmkv_client.connector.worker.page_copier import check_packing
from lmkv_client.demo.model import make_model
from lmkv_client.model_identity import WeightsSource, shared_identity
from lmkv_kernels import token_rows
from tests.client.connector.conftest import make_vllm_config
from tests.client.connector.simulated_models import require_groups

LAYERS = 4


@pytest.fixture(scope="module")
def tiny_config(tiny_model: Path) -> VllmConfig:
    """vLLM's configuration for the tiny model."""
    return make_vllm_config(tiny_model)


def cache_config(
    *,
    block_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    groups: int = 1,
    mode: KVQuantMode = KVQuantMode.NONE,
) -> KVCacheConfig:
    cache = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype=dtype, kv_quant_mode=mode)
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, cache) for _ in range(groups)]
    )


def spec_of(config: VllmConfig, caches: KVCacheConfig | None = None, **settings: Any) -> KvSpec:
    return engine_kv(config, caches or cache_config(), ConnectorConfig(**settings)).spec


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


def test_what_engines_of_other_kinds_share_has_no_engine_in_it(tiny_config: VllmConfig, tiny_model: Path) -> None:
    spec = spec_of(tiny_config, share_across_engines=True)
    config = tiny_config.model_config.hf_config.to_dict()
    identity = shared_identity(config, WeightsSource(model=str(tiny_model)), model_id="", kv_dtype="bfloat16")
    assert (spec.model_id, spec.format, spec.block_size, spec.tile_isa) == (identity, TOKEN_MAJOR, 0, "")
    assert spec.fingerprint != spec_of(tiny_config, kv_format="token_major").fingerprint
    named = spec_of(tiny_config, share_across_engines=True, model_id="llama@7").model_id
    assert named.startswith("shared:")
    assert named != identity


def test_the_scheme_of_keys_is_part_of_the_spec_and_pages_have_one_part(tiny_config: VllmConfig) -> None:
    of_tokens = {HASH_SCHEME, PAGE_HASH_SCHEME}
    assert {ConnectorConfig(hash_scheme=scheme).hash_scheme for scheme in of_tokens} == of_tokens
    with pytest.raises(ConfigError, match="hash_scheme"):
        ConnectorConfig(hash_scheme=MEDIA_HASH_SCHEME)
    pages = spec_of(tiny_config, share_across_engines=True, hash_scheme=PAGE_HASH_SCHEME)
    shared = spec_of(tiny_config, share_across_engines=True)
    assert pages.first_difference(shared) == "hash_scheme"
    with pytest.raises(ConfigError, match="hash_scheme: sha256-pages is for models whose layers all have full"):
        spec_of(tiny_config, groups_of((FULL, ["f"]), (SLIDING, ["w"])), hash_scheme=PAGE_HASH_SCHEME)


def test_kv_that_only_vllm_reads_is_not_shared(tiny_config: VllmConfig, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="share_across_engines: only vLLM reads native tiles"):
        spec_of(tiny_config, share_across_engines=True, kv_format="native")
    with pytest.raises(ConfigError, match="share_across_engines: only models whose layers all have full attention"):
        spec_of(tiny_config, groups_of((FULL, ["f"]), (SLIDING, ["w"])), share_across_engines=True)
    drafting = make_vllm_config(
        tiny_model,
        speculative_config={"num_speculative_tokens": 2, "method": "draft_model", "model": str(tiny_model)},
    )
    with pytest.raises(ConfigError, match=r"share_across_engines: .* layers of a draft model"):
        spec_of(drafting, share_across_engines=True)
    quantized = cache_config(dtype=torch.uint8, mode=KVQuantMode.FP8_PER_TENSOR)
    config = make_vllm_config(tiny_model, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="share_across_engines: KV of fp8_e4m3"):
        spec_of(config, quantized, share_across_engines=True)


def test_a_chunk_size_that_is_no_multiple_of_the_block_size_is_refused(tiny_config: VllmConfig) -> None:
    with pytest.raises(BadKvSpec, match=r"chunk_size 100 .* block size 32"):
        spec_of(tiny_config, chunk_size=100)


SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SHAPE)
SLIDING = kinds.SlidingWindowSpec(sliding_window=128, **SHAPE)
CHUNKED = kinds.ChunkedLocalAttentionSpec(attention_chunk_size=512, **SHAPE)
STATES = kinds.MambaSpec(block_size=256, shapes=((2, 64), (3, 8)), dtypes=(torch.float32, torch.bfloat16))


def groups_of(*groups: tuple[KVCacheSpec, list[str]], hit_alignment: int | None = None) -> KVCacheConfig:
    require_groups()
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, cache) for cache, names in groups],
        cache_hit_alignment_tokens=hit_alignment,
    )


def test_layers_of_one_kind_are_one_part_whatever_their_groups(tiny_config: VllmConfig) -> None:
    config = groups_of((SLIDING, ["a", "b"]), (FULL, ["c", "d"]), (SLIDING, ["e", "f"]))
    kv = engine_kv(tiny_config, config, ConnectorConfig())
    full, sliding = kv.spec.parts
    assert (full.rule, full.layer_count, full.span) == (PART_RULE_ALL, 2, 0)
    assert (sliding.rule, sliding.layer_count, sliding.span) == (PART_RULE_LAST, 4, 128)
    assert kv.groups == (
        LayerGroup(part=1, block_size=32, layer_names=("a", "b"), first_layer=0),
        LayerGroup(part=0, block_size=32, layer_names=("c", "d"), first_layer=0),
        LayerGroup(part=1, block_size=32, layer_names=("e", "f"), first_layer=2),
    )
    assert not kv.spec.has_plain_parts
    others = groups_of((SLIDING, ["a", "e"]), (FULL, ["c", "d"]), (SLIDING, ["b", "f"]))
    assert spec_of(tiny_config, others).fingerprint != kv.spec.fingerprint, "their extents have other layers"


def test_each_kind_of_cache_has_its_rule(tiny_config: VllmConfig) -> None:
    config = groups_of((STATES, ["s"]), (CHUNKED, ["l"]), (FULL, ["f"]), (SLIDING, ["w"]), hit_alignment=256)
    spec = spec_of(tiny_config, config)
    rules = [(part.rule, part.span) for part in spec.parts]
    assert rules == [(PART_RULE_ALL, 0), (PART_RULE_LAST, 128), (PART_RULE_SINCE_MULTIPLE, 512), (PART_RULE_END, 0)]
    state_bytes = 2 * 64 * 4 + 3 * 8 * 2
    assert spec.parts[3] == KvPart(
        rule=PART_RULE_END,
        layer_count=1,
        kv_head_count=1,
        head_size=state_bytes,
        kv_dtype="int8",
        layers=spec.parts[3].layers,
    )


@pytest.mark.parametrize(
    "other",
    [
        {"dtypes": (torch.float32, torch.float16)},
        {"shapes": ((64, 2), (3, 8))},
        {"mamba_type": MambaAttentionBackendEnum.GDN_ATTN},
    ],
    ids=lambda other: next(iter(other)),
)
def test_states_of_equal_size_that_mean_something_else_have_another_fingerprint(
    tiny_config: VllmConfig, other: dict[str, Any]
) -> None:
    require_groups()
    states = replace(STATES, **other)
    assert states.state_content_size_bytes == STATES.state_content_size_bytes
    first, second = (spec_of(tiny_config, groups_of((FULL, ["f"]), (one, ["s"]))) for one in (STATES, states))
    assert first.parts[1].size_bytes(256) == second.parts[1].size_bytes(256)
    assert first.fingerprint != second.fingerprint


def test_a_model_whose_layers_all_slide_has_one_part_that_is_not_plain(tiny_config: VllmConfig) -> None:
    spec = spec_of(tiny_config, groups_of((SLIDING, ["a", "b"])))
    assert (len(spec.parts), spec.rule, spec.span, spec.has_plain_parts) == (1, PART_RULE_LAST, 128, False)


def test_two_groups_of_full_attention_are_one_part_that_is_not_plain(tiny_config: VllmConfig) -> None:
    require_groups()
    """vLLM handles a failed load by request where it has several groups, so that hits are all or nothing."""
    spec = spec_of(tiny_config, cache_config(groups=2))
    assert (len(spec.parts), spec.rule, spec.has_plain_parts) == (1, PART_RULE_ALL, False)


@pytest.mark.parametrize(
    "caches",
    [(FULL, SLIDING), (FULL, FULL), (SLIDING,), (STATES,)],
    ids=("window", "two full", "window only", "states only"),
)
def test_a_vllm_without_hit_alignment_serves_one_group_of_full_attention_only(
    tiny_config: VllmConfig, caches: tuple[KVCacheSpec, ...]
) -> None:
    """vLLM 0.31 has no `KVCacheConfig.cache_hit_alignment_tokens`."""

    def older(*caches: KVCacheSpec) -> SimpleNamespace:
        return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec([str(at)], one) for at, one in enumerate(caches)])

    assert spec_of(tiny_config, older(FULL)).has_plain_parts
    with pytest.raises(ConfigError) as refused:
        spec_of(tiny_config, older(*caches))
    line = str(refused.value)
    assert f"vLLM {VLLM_VERSION} lacks what lmkv needs" in line
    assert "install vLLM 0.32 or newer" in line
    assert "\n" not in line


def test_a_model_with_states_has_chunks_where_vllm_keeps_them(tiny_config: VllmConfig) -> None:
    config = groups_of((FULL, ["f"]), (STATES, ["s"]), hit_alignment=512)
    assert spec_of(tiny_config, config).chunk_size == 512
    assert spec_of(tiny_config, config, chunk_size=512).chunk_size == 512
    with pytest.raises(ConfigError, match="chunk_size to 512, or leave it out"):
        spec_of(tiny_config, config, chunk_size=1024)


@pytest.mark.parametrize("chunk_size", [192, 320])
def test_chunks_that_local_attention_chunks_cut_are_refused(tiny_config: VllmConfig, chunk_size: int) -> None:
    with pytest.raises(ConfigError, match=f"{chunk_size} tokens neither divide the 512"):
        spec_of(tiny_config, groups_of((FULL, ["f"]), (CHUNKED, ["l"])), chunk_size=chunk_size)
    assert spec_of(tiny_config, groups_of((FULL, ["f"]), (CHUNKED, ["l"])), chunk_size=1024).chunk_size == 1024


def test_chunks_that_are_no_multiple_of_every_groups_blocks_are_refused(tiny_config: VllmConfig) -> None:
    coarse = kinds.SlidingWindowSpec(sliding_window=128, **(SHAPE | {"block_size": 512}))
    with pytest.raises(ConfigError, match="chunk_size: 256 is not a multiple of 512"):
        spec_of(tiny_config, groups_of((FULL, ["f"]), (coarse, ["w"])), kv_format="token_major")


@pytest.mark.parametrize(
    "cache",
    [
        kinds.SlidingWindowMLASpec(sliding_window=1024, **SHAPE),
        kinds.RSWASpec(rswa_window=1024, **SHAPE),
        kinds.SinkFullAttentionSpec(sink_len=32, **SHAPE),
        kinds.HiddenStateCacheSpec(**SHAPE),
        kinds.CrossAttentionSpec(**SHAPE),
        kinds.EncoderOnlyAttentionSpec(**SHAPE),
        kinds.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"layer": FullAttentionSpec(**SHAPE)}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kind_of_cache_that_is_not_known_is_refused_in_one_line(
    tiny_config: VllmConfig, tiny_model: Path, cache: KVCacheSpec
) -> None:
    """Subclasses as well: nothing is known of when vLLM frees their pages."""
    with pytest.raises(ConfigError) as refused:
        spec_of(tiny_config, groups_of((FULL, ["f"]), (cache, ["layer"])))
    line = str(refused.value)
    assert f"model {tiny_model} has a KV cache of kind {type(cache).__name__}, " in line
    assert "remove --kv-transfer-config" in line
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
    tiny_config: VllmConfig, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    monkeypatch.setattr(tiny_config.model_config, "dtype", dtype)
    isa = attention_isa(tiny_config, head_size, block_size)
    if isa == "amx":  # bfloat16 on processors with AMX
        with pytest.raises(ConfigError, match=r"kv_format: .*'amx'.*use kv_format native"):
            check_packing(isa, head_size, block_size, dtype)
        isa = "vec"
    check_packing(isa, head_size, block_size, dtype)


def test_a_packing_that_is_not_as_expected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_format: .*'mmx'.*use kv_format native"):
        check_packing("mmx", 64, 32, torch.bfloat16)
    monkeypatch.setattr(
        "lmkv_client.connector.worker.page_copier.packed_rows", token_rows
    )  # as if keys were not turned
    with pytest.raises(ConfigError, match=r"not where they should be.*use kv_format native"):
        check_packing("vec", 64, 32, torch.bfloat16)


@pytest.mark.parametrize(
    ("cache_dtype", "element", "name"),
    [
        ("auto", torch.bfloat16, "bfloat16"),
        ("auto", torch.float32, "float32"),
        ("fp8", torch.uint8, "fp8_e4m3"),
        ("fp8_e4m3", torch.uint8, "fp8_e4m3"),
        ("fp8_e5m2", torch.uint8, "fp8_e5m2"),
        ("float16", torch.float16, "float16"),
    ],
)
def test_element_types_have_lmkvs_names(cache_dtype: str, element: torch.dtype, name: str) -> None:
    assert kv_dtype(attention(dtype=element, kv_quant_mode=get_kv_quant_mode(cache_dtype)), cache_dtype) == name


def test_layers_that_keep_the_models_type_are_of_that_type() -> None:
    """vLLM's `kv_cache_dtype_skip_layers`: their caches are not quantized, whatever `kv_cache_dtype` is."""
    assert kv_dtype(attention(dtype=torch.bfloat16), "fp8") == "bfloat16"


EVERY_DTYPE = get_args(CacheDType)


@pytest.mark.parametrize("cache_dtype", EVERY_DTYPE)
def test_every_kv_cache_dtype_of_vllm_is_stored_by_its_name_or_refused(cache_dtype: str) -> None:
    mode = get_kv_quant_mode(cache_dtype)
    cache = attention(dtype=torch.uint8 if mode else torch.bfloat16, kv_quant_mode=mode)
    if cache_dtype in (*PLAIN_DTYPES, *PER_TENSOR_DTYPES):
        check_elements(cache, cache_dtype)
        assert kv_dtype(cache, cache_dtype) in DTYPE_BYTES
    else:
        assert cache_dtype.partition("_")[0] in ("fp8", "nvfp4", "turboquant", "ultraquant", "octave", "int4", "int8")
        with pytest.raises(ConfigError, match=f"kv_cache_dtype {cache_dtype}: its pages have scales"):
            check_elements(cache, cache_dtype)


@pytest.mark.parametrize("cache_dtype", [*PLAIN_DTYPES, *PER_TENSOR_DTYPES])
@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode > KVQuantMode.FP8_PER_TENSOR])
def test_a_known_name_of_a_dtype_that_a_platform_has_redefined_is_refused(cache_dtype: str, mode: KVQuantMode) -> None:
    """vLLM 0.33 lets platforms register a `kv_cache_dtype` with a quantization of their own, also over a known one."""
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {cache_dtype}: its pages have scales"):
        check_elements(attention(dtype=torch.uint8, kv_quant_mode=mode), cache_dtype)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_size_v": 32}, "its values have 32 elements per head, its keys 64"),
        ({"tokens_per_state": 4}, "one state for several tokens"),
        ({"tokens_per_state": Fraction(1, 2)}, "one state for several tokens"),
        ({"num_head_slots": 4}, "packed in a way of their own"),
        ({"state_content_bytes": 100}, "packed in a way of their own"),
        ({"kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD}, "its pages have scales"),
    ],
)
def test_pages_that_hold_more_than_keys_and_values_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not store this KV cache: .*{reason}.*remove --kv-transfer-config"):
        check_elements(attention(**fields), "auto")
    check_elements(attention(state_content_bytes=2 * 64 * 2, num_head_slots=2), "auto")


def attention(**fields: Any) -> FullAttentionSpec:
    """A layer's cache."""
    return FullAttentionSpec(
        **({"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16} | fields)
    )


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ((), "the model keeps no KV cache"),
        ((attention(non_causal=True),), "attended to in both directions"),
        ((FULL, attention(non_causal=True)), "attended to in both directions"),
    ],
    ids=("none", "prefix-LM", "some layers"),
)
def test_what_vllm_does_not_reuse_is_refused(
    tiny_config: VllmConfig, caches: tuple[KVCacheSpec, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^LMKVConnector: model .* cannot be cached: .*{reason}.*; remove"):
        check_reuse(tiny_config, caches)


@pytest.mark.parametrize("kind", get_args(SequencePoolingType))
def test_pooling_that_needs_the_whole_prompt_is_refused_as_vllm_says(tiny_model: Path, kind: str) -> None:
    config = make_vllm_config(
        tiny_model, runner="pooling", convert="embed", pooler_config=PoolerConfig(seq_pooling_type=kind)
    )
    if kind == "LAST":
        check_reuse(config, [FULL])
    else:
        with pytest.raises(ConfigError, match=rf"vLLM does not reuse prefixes of it \(attention: .*{kind} pooling"):
            check_reuse(config, [FULL])


def test_a_users_choice_against_vllms_own_cache_is_no_reason(tiny_model: Path) -> None:
    check_reuse(make_vllm_config(tiny_model, enable_prefix_caching=False), [FULL])


@pytest.mark.parametrize(("window", "block", "kept"), [(20, 32, 32), (34, 32, 64), (256, 32, 256), (257, 0, 256)])
def test_a_window_shorter_than_a_chunk_is_kept_in_whole_pages(
    tiny_config: VllmConfig, window: int, block: int, kept: int
) -> None:
    """vLLM takes pages that were loaded for complete: tokens before the window may be read by hits that end earlier."""
    sliding = kinds.SlidingWindowSpec(sliding_window=window, **SHAPE)
    groups = [KVCacheGroupSpec(["full"], FULL), KVCacheGroupSpec(["slides"], sliding)]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    caches.cache_hit_alignment_tokens = 32
    spec = spec_of(tiny_config, caches, kv_format="token_major")
    assert [part.block_size for part in spec.parts] == [0, block]
    assert spec.parts[1].kept_tokens(256) == kept
