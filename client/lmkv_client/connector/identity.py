"""The identity of an engine's KV: digests of weights, and the heads that a rank has."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv.errors import ConfigError
from lmkv.spec import KvSpec
from lmkv_client.connector.vllm_api import LoadConfig, ModelConfig, VllmConfig
from lmkv_client.file_digests import process_start
from lmkv_client.model_identity import (
    architecture,
    digest_of,
    is_same_for_any_length,
    shared_identity,
    unknown_weights,
    weights_identity,
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


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """The KV heads that one rank has. Where ranks outnumber heads, or there is one latent for all, several have one."""

    first_head: int
    is_writer: bool
    """Whether the rank is the one that stores them."""

    @classmethod
    def of_rank(cls, rank: int, rank_count: int, kv_head_count: int) -> HeadShare:
        """The share of one of `rank_count` ranks."""
        per_head = max(1, rank_count // kv_head_count)
        return cls(first_head=rank * kv_head_count // rank_count, is_writer=rank % per_head == 0)


def head_shares(spec: KvSpec, rank: int, rank_count: int) -> list[HeadShare]:
    """What one of `rank_count` tensor-parallel ranks has of each part."""
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
    if (draft := _draft_model(vllm_config)) is not None:
        models.append(model_identity(draft, vllm_config.speculative_config.draft_load_config or load, after))
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        models.append("kv_sharing_fast_prefill")
    return models[0] if len(models) == 1 else digest_of(*models)


def model_identity(model: ModelConfig, load: LoadConfig, after: float) -> str:
    """Identity of the weights and of what vLLM makes of them: a digest over a local folder's content, or name and
    commit of a hub model; the model's configuration, dtype and quantization, and the code that vLLM runs it with.

    `after` is a time before the weights were loaded. Raises as `engine_identity`.
    """
    _check_source(model, load)
    weights = weights_identity(
        model.model, _commit(model), revision=model.revision, cache=load.download_dir, loaded_after=after
    )
    quantization = [str(model.quantization or ""), str(getattr(model, "quantization_config", None) or "")]
    return digest_of(architecture(model.hf_config.to_dict()), str(model.dtype), *quantization, *_how(model), weights)


def loaded_after(vllm_config: VllmConfig) -> float:
    """A time before the engine began to read the weights: that of its configuration, else the start of the process."""
    made: float | None = getattr(vllm_config.model_config, CONFIGURED_AT, None)
    return process_start() if made is None else made


def _how(model: ModelConfig) -> list[str]:
    """How vLLM computes with the weights, where that changes more than the last digits."""
    options = {name: str(getattr(model, name)) for name in COMPUTED_BY}
    if media := model.multimodal_config:
        options |= {name: str(getattr(media, name)) for name in ENCODED_BY}
        if media.mm_encoder_fp8_scale_path:
            raise unknown_weights(f"mm_encoder_fp8_scale_path is {media.mm_encoder_fp8_scale_path}")
    rotary = {"rope_parameters": getattr(model.hf_text_config, "rope_parameters", None)}
    if not is_same_for_any_length(rotary):  # vLLM chooses the factors of longrope by it
        options["max_model_len"] = str(model.max_model_len)
    return [f"{name}={value}" for name, value in sorted(options.items())]


def _check_source(model: ModelConfig, load: LoadConfig) -> None:
    """Raises `ConfigError` if vLLM reads the weights elsewhere than where the model's name says."""
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
    if _draft_model(vllm_config) is not None:
        raise ConfigError(
            "share_across_engines: the chunks of this engine have the layers of a draft model too",
            key="share_across_engines",
        )
    if not model_id:
        _check_source(model, vllm_config.load_config)
    return shared_identity(
        model.hf_config.to_dict(),
        model=model.model,
        commit=_commit(model),
        model_id=model_id,
        kv_dtype=kv_dtype,
        quantization=model.quantization,
        loaded_after=loaded_after(vllm_config),
    )


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
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
