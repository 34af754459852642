"""The identity of an engine's KV: digests of weights, the heads that a rank has, and the layers that a stage has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lmkv
from lmkv.errors import ConfigError
from lmkv.kv_inputs import KvInputs
from lmkv.spec import KvSpec
from lmkv_client.connector.vllm_api import (
    VLLM_VERSION,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    VllmConfig,
    envs,
    get_pp_indices,
)
from lmkv_client.file_digests import process_start
from lmkv_client.model_identity import (
    WeightsSource,
    architecture,
    digest_of,
    is_same_for_any_length,
    shared_identity,
    unknown_weights,
)
from lmkv_client.plugin import CONFIGURED_AT, SERVED_NAMES

FORMATS = (
    *("auto", "hf", "safetensors", "pt", "mistral", "npcache", "fastsafetensors", "instanttensor", "gguf"),
    *("bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
)
"""Values of `--load-format` with which vLLM reads the files of the model's folder, or of a hub model, and no others."""
HARMLESS_LOADER_OPTIONS = frozenset(
    {"enable_multithread_load", "num_threads", "enable_weights_track", "concurrency", "memory_limit", "distributed"}
)
"""Options of loaders that decide how files are read, and not which."""


COMPUTED_BY = ("code_revision", "disable_sliding_window", "model_class_overrides", "model_impl")
"""Attributes of vLLM's `ModelConfig` that decide which code computes, and to how many tokens it attends."""
ENCODED_BY = ("mm_encoder_attn_dtype", "video_pruning_method", "video_pruning_rate")
"""Attributes of `MultiModalConfig` that decide what encoders make of the processed media."""
ADAPTED_BY = ("enable_moe_shared_loras", "enable_tower_connector_lora", "lora_dtype", "target_modules")
"""Attributes of `LoRAConfig` that decide what an adapter changes."""

AITER = "VLLM_ROCM_USE_AITER"
VARIABLES: Mapping[str, object] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": "",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": "fp32",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": True,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER": False,
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": False,
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_USE_DEEP_GEMM_E8M0": True,
}
"""Environment variables of vLLM that decide how precisely it computes, or what; and the values that enter no identity,
which are vLLM's own."""
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "attention_config": {
        "disable_flashinfer_q_quantization": False,
        "indexer_kv_dtype": "auto",
        "indexer_sparse_logits": False,
        "use_prefill_query_quantization": False,
    },
    "cache_config": {"kv_sharing_fast_prefill": False},
    "mamba_config": {"enable_stochastic_rounding": False},
}
"""Options of vLLM that do the same, by the attributes of `VllmConfig` that have them."""


CONFIG = "config"
"""Name of the model's configuration among the inputs of its identity."""
VERSIONS: Mapping[str, str] = {"lmkv": lmkv.__version__, "vllm": VLLM_VERSION, "torch": torch.__version__}
"""Versions of what computes, and copies, the KV of this engine."""


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """The KV heads that one rank has. Where ranks outnumber heads, or there is one latent for all, several have one."""

    first_head: int
    is_writer: bool
    """Whether this rank stores them."""

    @classmethod
    def of_rank(cls, rank: int, rank_count: int, kv_head_count: int) -> HeadShare:
        per_head = max(1, rank_count // kv_head_count)
        return cls(first_head=rank * kv_head_count // rank_count, is_writer=rank % per_head == 0)


def head_shares(spec: KvSpec, rank: int, rank_count: int) -> list[HeadShare]:
    """Returns the heads of each part that one of `rank_count` tensor-parallel ranks has."""
    return [HeadShare.of_rank(rank, rank_count, part.kv_head_count) for part in spec.parts]


def served_names(model: ModelConfig) -> list[str]:
    """The names under which the model is served, the first of them first."""
    names = getattr(model, SERVED_NAMES, None) or model.served_model_name or str(model.model)
    return [names] if isinstance(names, str) else list(names)


def engine_identity(vllm_config: VllmConfig) -> str:
    """Identity of all weights that make KV: the model's, and those of a draft model whose layers are cached with it.

    Raises `ConfigError` if these weights are not known.
    """
    load, after = vllm_config.load_config, loaded_after(vllm_config)
    models = [model_identity(vllm_config.model_config, load, after)]
    if (draft := draft_model(vllm_config)) is not None:
        models.append(model_identity(draft, vllm_config.speculative_config.draft_load_config or load, after))
    modes = changed_modes(vllm_config)
    return models[0] if len(models) == 1 and not modes else digest_of(*models, *modes)


def changed_modes(vllm_config: VllmConfig) -> list[str]:
    """The variables and options of this engine that change its KV, as `name=value`."""
    found = {name: (getattr(envs, name, usual), usual) for name, usual in VARIABLES.items()}
    if not getattr(envs, AITER, False):  # vLLM reads the others only with it, and changes what they are by themselves
        found = {name: values for name, values in found.items() if not name.startswith(AITER)}
    for attribute, options in OPTIONS.items():
        config = getattr(vllm_config, attribute)
        found |= {name: (getattr(config, name, usual), usual) for name, usual in options.items()}
    return [f"{name}={value}" for name, (value, usual) in sorted(found.items()) if value != usual]


def adapter_options(lora: LoRAConfig) -> str:
    """The engine's options that change what an adapter computes; its files are identified elsewhere."""
    options: dict[str, Any] = {name: getattr(lora, name) for name in ADAPTED_BY}
    if options["target_modules"] is not None:
        options["target_modules"] = sorted(options["target_modules"])
    return str(options)


def model_identity(model: ModelConfig, load: LoadConfig, after: float) -> str:
    """Identity of the weights and of what vLLM makes of them: a digest over `model_inputs`."""
    return digest_of(*model_inputs(model, load, after).values())


def model_inputs(model: ModelConfig, load: LoadConfig, after: float) -> dict[str, str]:
    """The inputs of a model's identity by name: the model's configuration, dtype and quantization, the code that vLLM
    runs it with, and the weights: a digest over a local folder's content, or name and commit of a hub model.

    `after` is a time before the weights were loaded. Raises as `engine_identity`.
    """
    _check_source(model, load)
    weights = WeightsSource(
        model=model.model,
        commit=_commit(model),
        revision=model.revision,
        cache=load.download_dir,
        loaded_after=after,
    )
    return {
        CONFIG: architecture(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        "quantization_config": str(getattr(model, "quantization_config", None) or ""),
        **_how(model),
        "weights": weights.identity(),
    }


def kv_inputs(vllm_config: VllmConfig, configured_id: str) -> KvInputs:
    """The inputs of this engine's KV, for the records of wrong chunks; `configured_id` is the identity of the weights
    if it was configured, or shared, and not computed.

    Raises as `engine_identity`.
    """
    model = vllm_config.model_config
    known = {
        **{f"{CONFIG}.{name}": json.dumps(value, default=str) for name, value in model.hf_config.to_dict().items()},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization or ""),
        **_how(model),
        "model": str(model.model),
        "load_format": str(vllm_config.load_config.load_format),
        "max_model_len": str(model.max_model_len),
        "tensor_parallel_size": str(vllm_config.parallel_config.tensor_parallel_size),
        "attention_config": str(vllm_config.attention_config),
        **{name: str(getattr(envs, name, usual)) for name, usual in VARIABLES.items()},
        **VERSIONS,
    }
    if configured_id:
        named = {"model_id": configured_id}
    else:
        named = model_inputs(model, vllm_config.load_config, loaded_after(vllm_config))
        config = json.loads(named.pop(CONFIG))
        named |= {f"{CONFIG}.{name}": json.dumps(value) for name, value in config.items()}
        if modes := changed_modes(vllm_config):
            named["modes"] = ", ".join(modes)
    return KvInputs(named=named, others={name: value for name, value in known.items() if name not in named})


def loaded_after(vllm_config: VllmConfig) -> float:
    """A time before the engine began to read the weights: that of its configuration, else the start of the process."""
    made: float | None = getattr(vllm_config.model_config, CONFIGURED_AT, None)
    return process_start() if made is None else made


def _how(model: ModelConfig) -> dict[str, str]:
    """Returns the options by which vLLM computes with the weights, if they change more than the last digits: each as
    `name=value`, by name."""
    options = {name: str(getattr(model, name)) for name in COMPUTED_BY}
    if media := model.multimodal_config:
        options |= {name: str(getattr(media, name)) for name in ENCODED_BY}
        if media.mm_encoder_fp8_scale_path:
            raise unknown_weights(f"mm_encoder_fp8_scale_path is {media.mm_encoder_fp8_scale_path}")
    rotary = {"rope_parameters": getattr(model.hf_text_config, "rope_parameters", None)}
    if not is_same_for_any_length(rotary):  # vLLM chooses the factors of longrope by it
        options["max_model_len"] = str(model.max_model_len)
    return {name: f"{name}={value}" for name, value in sorted(options.items())}


def _check_source(model: ModelConfig, load: LoadConfig) -> None:
    """Raises `ConfigError` if vLLM reads the weights elsewhere than where the model's name says."""
    if envs.VLLM_USE_MODELSCOPE and not Path(model.model).exists():
        raise unknown_weights(f"the weights of {model.model} are ModelScope's, whose revisions are not commits")
    if elsewhere := getattr(model, "model_weights", ""):
        raise unknown_weights(f"the weights are at {elsewhere}")
    if load.load_format not in FORMATS:
        raise unknown_weights(f"load_format is {load.load_format}")
    extra = load.model_loader_extra_config
    if set(extra) - HARMLESS_LOADER_OPTIONS:
        raise unknown_weights(f"model_loader_extra_config is {extra}")


def identity_across_engines(vllm_config: VllmConfig, *, kv_dtype: str, model_id: str) -> str:
    """Identity of KV that engines of other kinds may share. Raises `ConfigError` if this engine's KV is not such."""
    model = vllm_config.model_config
    if draft_model(vllm_config) is not None:
        raise ConfigError(
            "share_across_engines: the chunks of this engine have the layers of a draft model too",
            key="share_across_engines",
        )
    if modes := changed_modes(vllm_config):
        raise ConfigError(
            f"share_across_engines: other engines do not compute with {', '.join(modes)}", key="share_across_engines"
        )
    if not model_id:
        _check_source(model, vllm_config.load_config)
    return shared_identity(
        model.hf_config.to_dict(),
        WeightsSource(model=model.model, commit=_commit(model), loaded_after=loaded_after(vllm_config)),
        model_id=model_id,
        kv_dtype=kv_dtype,
        quantization=model.quantization,
    )


def draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """The draft model whose layers are cached with the model's own, if there is one."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    return speculative.draft_model_config


def _commit(model: ModelConfig) -> str | None:
    """The commit of the model's configuration, unless it is that of another model; else the revision."""
    is_own = model.hf_config_path in (None, "", model.model)
    commit: str | None = (getattr(model.hf_config, "_commit_hash", None) if is_own else None) or model.revision
    return commit


def worker_rank(stage: int, tensor_rank: int, tensor_ranks: int) -> int:
    """The number of a worker within its engine. vLLM counts the workers stage by stage."""
    return stage * tensor_ranks + tensor_rank


def stage_layers(layer_count: int, stage: int, stage_count: int) -> range:
    """The layers that vLLM gives to a stage; `layer_count` is that of the model."""
    return range(*get_pp_indices(layer_count, stage, stage_count))


def first_layer(layer_names: Sequence[str], layer_count: int, stage: int, stage_count: int) -> int:
    """Index in a chunk of the first layer that a stage keeps pages for, where all layers are of one kind.

    `layer_names` has the layers of the stage's KV-cache group. Raises `ConfigError` if the group keeps pages for layers
    of other stages, or of a draft model.
    """
    if stage_count == 1:
        return 0
    own = stage_layers(layer_count, stage, stage_count)
    if [_index(name) for name in layer_names] != list(own):
        raise ConfigError(
            f"LMKVConnector: pipeline_parallel_size: stage {stage} should keep pages for layers {own.start} to "
            f"{own.stop - 1} and keeps them for {', '.join(layer_names)}; use pipeline_parallel_size 1",
            key="pipeline_parallel_size",
        )
    return own.start


def _index(layer_name: str) -> int:
    """Index of a layer in the model, such as 3 of `model.layers.3.self_attn.attn`; -1 if the name has none."""
    return next((int(word) for word in layer_name.split(".") if word.isdigit()), -1)
