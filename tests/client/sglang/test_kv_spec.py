"""What separates the pages of two SGLang engines, and what does not."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmkv.errors import ConfigError
from lmkv.keys import PAGE_HASH_SCHEME
from lmkv.spec import KvSpec
from lmkv_client.demo.model import TINY, make_model
from lmkv_client.sglang.host_pool import pool_tensors
from lmkv_client.sglang.kv_spec import (
    COMPUTED_BY,
    DIVIDED,
    ELSEWHERE,
    FILES,
    OF_CONFIG,
    adapters_identity,
    check_shares,
    identity_across_engines,
    identity_of,
    kv_dtype,
    make_spec,
)
from lmkv_client.sglang.sglang_api import ModelSource, is_writer, served_model, shards
from tests.client.sglang.contract import (
    HEADS,
    LATENT,
    LAYERS,
    MLA_SHAPES,
    PAGE_SIZE,
    SHAPES,
    SIZE,
    StorageConfigFields,
    host_pool,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def spec_of(layout: str = "page_first", *, is_mla: bool = False, **changes: Any) -> KvSpec:
    fields: dict[str, Any] = {"model_name": "tiny", "model_id": "id", "kv_dtype": "bfloat16", "page_size": PAGE_SIZE}
    fields |= changes
    shards = fields.pop("shards", {})
    return make_spec(pool_tensors(host_pool(layout, is_mla=is_mla), is_mla=is_mla), shards, **fields)


def test_a_chunk_is_a_page() -> None:
    spec = spec_of()
    assert (spec.layer_count, spec.kv_head_count, spec.head_size) == (LAYERS, HEADS, SIZE)
    assert (spec.chunk_size, spec.hash_scheme, spec.mla) == (PAGE_SIZE, PAGE_HASH_SCHEME, False)
    assert spec.chunk_bytes == 2 * LAYERS * HEADS * SIZE * PAGE_SIZE * 2


def test_with_mla_a_chunk_is_a_page_of_latents() -> None:
    spec = spec_of(is_mla=True)
    assert (spec.kv_head_count, spec.head_size, spec.mla) == (1, LATENT, True)
    assert spec.chunk_bytes == LAYERS * LATENT * PAGE_SIZE * 2


def test_layouts_of_the_host_pool_share_chunks() -> None:
    assert len({spec_of(layout) for layout in SHAPES}) == 1
    assert len({spec_of(layout, is_mla=True) for layout in MLA_SHAPES}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": "other"},
        {"kv_dtype": "float16"},
        {"kv_dtype": "fp8_e4m3"},
        {"shards": {"tp": (0, 2)}},
        {"shards": {"pp": (0, 2)}},
        {"weight_version": "42"},
    ],
    ids=str,
)
def test_what_its_keys_lack_separates_engines(changes: dict[str, Any]) -> None:
    assert spec_of(**changes).fingerprint != spec_of().fingerprint


def test_ranks_and_sizes_separate_ranks() -> None:
    made = [spec_of(shards={"tp": share}).fingerprint for share in ((0, 2), (1, 2), (1, 4))]
    assert len(set(made)) == 3


def test_elements_of_eight_bits_are_named_by_their_flag() -> None:
    assert kv_dtype("torch.bfloat16", "auto") == "bfloat16"
    assert kv_dtype("torch.uint8", "fp8_e5m2") == "fp8_e5m2"


@pytest.mark.parametrize(("stored", "flag"), [("torch.uint8", "auto"), ("torch.uint8", "fp4_e2m1"), ("torch.int8", "")])
def test_a_dtype_that_is_not_known_is_refused_by_its_flag(stored: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {flag}"):
        kv_dtype(stored, flag)


def test_a_rank_is_named_by_each_kind_of_parallelism_that_divides_its_pages() -> None:
    assert shards(StorageConfigFields()) == {}
    config = StorageConfigFields(tp_rank=1, tp_size=2, pp_rank=0, pp_size=3, attn_cp_rank=4, attn_cp_size=5)
    assert shards(config) == {"tp": (1, 2), "pp": (0, 3), "cp": (4, 5)}
    assert shards(StorageConfigFields(tp_rank=1, tp_size=2, is_mla_model=True)) == {}


def test_of_ranks_with_the_same_pages_one_writes() -> None:
    assert is_writer(StorageConfigFields(tp_rank=1, tp_size=2))
    assert is_writer(StorageConfigFields(tp_rank=0, tp_size=2, is_mla_model=True))
    assert not is_writer(StorageConfigFields(tp_rank=1, tp_size=2, is_mla_model=True))
    config = StorageConfigFields(tp_rank=1, tp_size=2, is_mla_model=True)
    config.is_storage_writer = True  # type: ignore[attr-defined]  # what SGLang says counts
    assert is_writer(config)


def test_the_weights_identify_a_model_and_its_name_does_not(tmp_path: Path) -> None:
    one, same = (make_model(tmp_path / name, TINY) for name in ("one", "same"))
    other = make_model(tmp_path / "other", TINY, seed=1)
    identities = [identity_of(served_model(str(folder))) for folder in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    with pytest.raises(ConfigError, match=r"the commit of organization/model is not known.*set model_id"):
        identity_of(served_model("organization/model"))


def test_the_identity_of_a_model_never_changes() -> None:
    """It is in keys: engines of another version of lmkv would not find what these have stored."""
    model = ModelSource(path="organization/model", revision=COMMIT, config={"model_type": "llama", "hidden_size": 64})
    assert identity_of(model) == "188e973d6a435e18d9a2ef3b0b21c7b2"


def test_a_draft_model_separates_engines() -> None:
    drafts = [("", ""), ("organization/draft", COMMIT), ("organization/draft", COMMIT[::-1]), ("other/draft", COMMIT)]
    models = [
        ModelSource(path="organization/model", revision=COMMIT, draft_path=draft, draft_revision=commit)
        for draft, commit in drafts
    ]
    assert len({identity_of(model) for model in models}) == 4


def test_what_the_weights_become_in_memory_separates_engines() -> None:
    models = [
        ModelSource(path="organization/model", revision=COMMIT, dtype=dtype, quantization=quantization)
        for dtype in ("bfloat16", "float16")
        for quantization in ("", "fp8")
    ]
    assert len({identity_of(model) for model in models}) == 4


@pytest.mark.parametrize("load_format", ["dummy", "remote", "remote_instance", "of-a-plugin"])
def test_weights_that_are_elsewhere_need_a_name(load_format: str) -> None:
    model = ModelSource(path="organization/model", revision=COMMIT, load_format=load_format)
    with pytest.raises(ConfigError, match=rf"load_format is {load_format}, .*set model_id"):
        identity_of(model)
    with pytest.raises(ConfigError, match=r"the weights are at s3://models/base, .*set model_id"):
        identity_of(ModelSource(path="s3://models/base"))


HUB = ModelSource(path="organization/model", revision=COMMIT, config={"model_type": "llama", "hidden_size": 64})


def with_options(**options: Any) -> ModelSource:
    return replace(HUB, options=options)


@pytest.mark.parametrize("name", sorted({*COMPUTED_BY, *OF_CONFIG} - set(FILES)))
def test_arguments_that_change_what_is_computed_separate_engines(name: str) -> None:
    values = ('{"rope_theta": 1}', '{"rope_theta": 2}')
    assert len({identity_of(HUB), *(identity_of(with_options(**{name: value})) for value in values)}) == 3


@pytest.mark.parametrize("name", FILES)
def test_files_that_arguments_name_count_by_their_content(tmp_path: Path, name: str) -> None:
    one, same, other = (tmp_path / each for each in ("one", "same", "other"))
    for file, scale in ((one, 1.0), (same, 1.0), (other, 2.0)):
        file.write_text(json.dumps({"kv_cache": {"scaling_factor": {"0": {"0": scale}}}}))
    identities = [identity_of(with_options(**{name: str(file)})) for file in (one, same, other)]
    assert identity_of(HUB) != identities[0] == identities[1] != identities[2]
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} .*missing cannot be read.*set model_id"):
        identity_of(with_options(**{name: str(tmp_path / "missing")}))
    begun = replace(with_options(**{name: str(one)}), loaded_after=time.time() - 60)
    with pytest.raises(ConfigError, match="has changed since the engine began to load it"):
        identity_of(begun)


def test_an_attention_that_leaves_tokens_out_separates_engines_and_a_kernel_does_not() -> None:
    kernels = {identity_of(with_options(attention_backend=name)) for name in ("fa3", "triton")}
    assert kernels == {identity_of(HUB)}
    assert identity_of(with_options(prefill_attention_backend="minicpm_flashattn")) not in kernels


def test_the_context_length_counts_where_the_rotary_embedding_depends_on_it() -> None:
    for rope, is_same in ((None, True), ({"rope_type": "yarn"}, True), ({"type": "longrope"}, False)):
        configured = replace(HUB, config={**HUB.config, "rope_scaling": rope})
        longer = replace(configured, options={"context_length": 65_536})
        assert (identity_of(longer) == identity_of(configured)) == is_same
    overrides = {"json_model_override_args": '{"text_config": {"rope_parameters": {"rope_type": "dynamic"}}}'}
    assert identity_of(with_options(**overrides, context_length=1)) != identity_of(with_options(**overrides))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_arguments_by_which_weights_come_from_elsewhere_need_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is there, .*set model_id"):
        identity_of(with_options(**{name: "there"}))


def test_options_of_loaders_that_choose_files_need_a_name() -> None:
    assert identity_of(with_options(model_loader_extra_config='{"num_threads": 8}')) == identity_of(HUB)
    with pytest.raises(ConfigError, match=r"model_loader_extra_config is .*presharded_path.*set model_id"):
        identity_of(with_options(model_loader_extra_config='{"presharded_path": "/there"}'))
    with pytest.raises(ConfigError, match="load_format is dummy"):
        identity_of(with_options(speculative_draft_load_format="dummy"))


@pytest.mark.parametrize("name", DIVIDED)
def test_shares_of_ranks_that_are_not_known_are_refused(name: str) -> None:
    check_shares(HUB)
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')}: this version of lmkv does not know"):
        check_shares(with_options(**{name: True}))


def make_adapter(folder: Path, *, alpha: int = 16, scale: float = 1.0) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": alpha, "target_modules": ["q_proj"]}))
    save_file({"q_proj.lora_A.weight": torch.ones(8, 4) * scale}, folder / "adapter_model.safetensors")
    return folder


def with_adapter(folder: Path, name: str = "one", **options: Any) -> ModelSource:
    return replace(with_options(**options), adapters=((name, str(folder)),))


def test_adapters_that_a_server_begins_with_count_by_their_content(tmp_path: Path) -> None:
    """SGLang names their pages by name and path: here the path is the same, and the content is not."""
    folder = make_adapter(tmp_path / "adapter")
    first = adapters_identity(with_adapter(folder))
    assert adapters_identity(HUB) == ""
    assert adapters_identity(with_adapter(folder)) == first
    others = {adapters_identity(with_adapter(folder, lora_strict_loading=True))}
    for number, changes in enumerate(({"alpha": 32}, {"scale": 1.001})):
        folder.rename(tmp_path / f"before{number}")
        make_adapter(folder, **changes)  # type: ignore[arg-type]
        others.add(adapters_identity(with_adapter(folder)))
    (folder / "added_tokens.json").write_text('{"<new>": 500}')
    others.add(adapters_identity(with_adapter(folder)))
    assert len(others | {first}) == 5
    two = (("one", str(folder)), ("two", str(tmp_path / "before0")))
    assert len({adapters_identity(replace(HUB, adapters=each)) for each in (two, two[::-1])}) == 1


def test_adapters_whose_files_are_not_known_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter")
    for model in (
        with_adapter(tmp_path / "missing"),
        with_adapter(tmp_path),
        replace(with_adapter(folder), loaded_after=time.time() - 60),
    ):
        with pytest.raises(
            ConfigError, match=r"--lora-paths: the files of adapter one are not known .*load_lora_adapter"
        ):
            adapters_identity(model)


def test_what_other_engines_do_not_know_is_not_shared_with_them(tmp_path: Path) -> None:
    def shared(model: ModelSource) -> str:
        config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
        return identity_across_engines(model, config, model_id="mine", kv_dtype="float32", shards={})

    assert shared(HUB) == shared(with_options(json_model_override_args="{}"))
    with pytest.raises(ConfigError, match="other engines do not know of adapters"):
        shared(with_adapter(make_adapter(tmp_path / "adapter")))
    with pytest.raises(ConfigError, match="other engines do not know of --rl-on-policy-target"):
        shared(with_options(rl_on_policy_target="fsdp"))
