"""The KvSpec of an SGLang engine: all that decides whether another engine can use its pages.

SGLang's keys name the tokens of a page and all before them, and nothing else: model, dtype and the rank's share of the
KV cache are separated by the spec. The layout of the host pool is not: chunks have one order of bytes for all layouts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack

from lmkv.errors import ConfigError
from lmkv.keys import PAGE_HASH_SCHEME
from lmkv.spec import KvSpec
from lmkv_client.file_digests import check_unchanged_since, stamps
from lmkv_client.model_identity import (
    ADAPTER_CONFIG,
    WeightsSource,
    adapter_digest,
    architecture,
    cached_snapshot,
    digest_of,
    is_same_for_any_length,
    shared_identity,
    unknown_weights,
    weight_files,
)
from lmkv_client.sglang.sglang_api import ModelSource

if TYPE_CHECKING:
    import torch

PLAIN_DTYPES = ("float32", "bfloat16", "float16")
STORED_AS_BYTES = ("fp8_e4m3", "fp8_e5m2")
"""Values of `--kv-cache-dtype` whose elements SGLang keeps as `uint8`."""


def kv_dtype(stored: str, flag: str) -> str:
    """The dtype of the KV cache as KvSpecs name it.

    `stored` is torch's name of the elements in the host pool, `flag` the value of `--kv-cache-dtype`. Raises
    `ConfigError` if lmkv does not know the dtype.
    """
    name = stored.removeprefix("torch.")
    if name in PLAIN_DTYPES:
        return name
    if name == "uint8" and flag in STORED_AS_BYTES:
        return flag
    known = ", ".join((*PLAIN_DTYPES, *STORED_AS_BYTES))
    raise ConfigError(
        f"--kv-cache-dtype {flag}: elements of {name} are unknown to this version of lmkv, which knows {known}",
        kv_cache_dtype=flag,
    )


class NamedModel(TypedDict, total=False):
    """Fields of the spec that are as configured."""

    model_name: Required[str]
    kv_dtype: Required[str]
    weight_version: str


def make_spec(
    tensors: Sequence[Sequence[torch.Tensor]],
    shards: Mapping[str, tuple[int, int]],
    *,
    page_size: int,
    model_id: str,
    **named: Unpack[NamedModel],
) -> KvSpec:
    """The spec of the pages of one rank.

    `tensors` are those of `pool_tensors`, and `shards` are the ranks and sizes by which the engine divides its KV cache
    (`sglang_api.shards`).
    """
    layer = tensors[0][0]
    shown = "".join(f" {kind} {rank}/{size}" for kind, (rank, size) in shards.items())
    return KvSpec(
        **named,
        model_id=model_id + shown,
        layer_count=len(tensors[0]),
        kv_head_count=layer.shape[1],
        head_size=layer.shape[3],
        chunk_size=page_size,
        mla=len(tensors) == 1,
        hash_scheme=PAGE_HASH_SCHEME,
    )


FORMATS = ("auto", "pt", "safetensors", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral", "layered")
"""Values of `--load-format` with which SGLang reads the files of the model's folder, or of a hub model."""
HARMLESS_LOADER_OPTIONS = frozenset({"enable_multithread_load", "num_threads"})
"""Options of loaders that decide how files are read, and not which."""
OF_CONFIG = ("json_model_override_args", "model_config_parser", "decrypted_config_file")
"""Arguments that decide about the model's configuration, beside its `config.json`."""
COMPUTED_BY = (
    *(
        "model_impl",
        "is_embedding",
        "quantize_and_serve",
        "modelopt_quant",
        "rl_on_policy_target",
        "enable_tf32_matmul",
    ),
    *("flashinfer_mxfp4_moe_precision", "enable_w4a4_mxfp4_megamoe", "enforce_shared_experts_fusion"),
    *("deepep_dispatcher_output_dtype", "flashinfer_a2a_dispatch_type", "enable_quant_communications"),
    *("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token", "enable_deepseek_v4_fp4_indexer"),
    *("qsa_indexer_dtype", "enable_hisparse", "hisparse_config", "quantization_param_path"),
    *("enable_encoder_swa_bounded_replay", "enable_decoder_swa_bounded_replay", "dllm_algorithm"),
    *("dllm_algorithm_config", "mm_process_config", "image_processor_backend", "disable_fast_image_processor"),
    *("enable_precise_embedding_interpolation",),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype", "speculative_draft_window_size"),
    *("speculative_draft_sink_size", "speculative_enable_w4a4_mxfp4_megamoe", "enable_multi_layer_eagle"),
    "decrypted_draft_config_file",
)
"""Other arguments that change keys and values by more than the last digits."""
FILES = ("decrypted_config_file", "decrypted_draft_config_file", "dllm_algorithm_config", "quantization_param_path")
"""Arguments that name a file, whose content counts."""
ATTENTION_BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
OTHER_ATTENTION = ("llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer", "qsa")
"""Attention backends that do not attend to all tokens; the others compute the same."""
ELSEWHERE = (
    *("modelopt_checkpoint_restore_path", "rl_quant_profile", "weight_cache_mode", "kt_weight_path", "uno_lora_path"),
    *("forward_hooks", "debug_tensor_dump_input_file"),
)
"""Arguments with which weights, or what is computed with them, come from somewhere else than the model's path."""
DIVIDED = ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split")
"""Arguments with which ranks have other shares of the KV cache than `shards` names."""
OF_ADAPTERS = ("lora_target_modules", "lora_strict_loading", "experts_shared_outer_loras")
"""Arguments that decide which weights of an adapter are used."""


def identity_of(model: ModelSource) -> str:
    """Identity of the weights: of a local folder from its files, of a model of Hugging Face from name and commit.

    Those of a draft model are part of it, and what else SGLang's arguments say about how it computes. Raises
    `ConfigError` if the weights are not known.
    """
    _check_source(model)
    models = [(model.path, model.revision)]
    if model.draft_path:
        models.append((model.draft_path, model.draft_revision))
    cache, after = _hub_cache(model), model.loaded_after
    weights = [
        WeightsSource(model=path, commit=revision, cache=cache, loaded_after=after).identity()
        for path, revision in models
    ]
    return digest_of(architecture(model.config), model.dtype, model.quantization, *weights, *_how(model))


def check_shares(model: ModelSource) -> None:
    """Raises `ConfigError` if the ranks of this server divide the KV cache in a way that lmkv does not know."""
    for name in DIVIDED:
        if name in model.options:
            raise ConfigError(
                f"{_flag(name)}: this version of lmkv does not know which pages a rank has then; unset it"
            )


def adapters_identity(model: ModelSource) -> str:
    """Identity of the adapters that the server begins with, to be added to that of the model; empty without any.

    SGLang names pages by an adapter's name and path, so that its content has to be here. Raises `ConfigError` if an
    adapter's files are not known.
    """
    if not model.adapters:
        return ""
    options = {name: model.options[name] for name in OF_ADAPTERS if name in model.options}
    digests = [_adapter(name, path, model) for name, path in sorted(model.adapters)]
    return " adapters " + digest_of(json.dumps(options, sort_keys=True, default=sorted), *digests)


def _adapter(name: str, path: str, model: ModelSource) -> str:
    try:
        folder = Path(path) if Path(path).is_dir() else cached_snapshot(path, "main", None)
        weights = stamps(weight_files(folder))
        config, added = folder / ADAPTER_CONFIG, folder / "added_tokens.json"
        if model.loaded_after is not None:
            check_unchanged_since(weights | stamps([config]), model.loaded_after)
        tokens = added.read_text() if added.exists() else ""
        return digest_of(name, path, adapter_digest(config, weights, model.dtype, tokens))
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(
            f"--lora-paths: the files of adapter {name} are not known ({error}); start the server again, or load the "
            "adapter once it runs, by /load_lora_adapter"
        ) from error


def _how(model: ModelSource) -> list[str]:
    """Returns the options by which SGLang computes with the weights, if they change more than the last digits."""
    options = {name: model.options[name] for name in (*OF_CONFIG, *COMPUTED_BY) if name in model.options}
    for name in FILES:
        if options.get(name):
            options[name] = _file_digest(name, str(options[name]), model.loaded_after)
    if any(model.options.get(name) in OTHER_ATTENTION for name in ATTENTION_BACKENDS):
        options |= {name: model.options.get(name) for name in ATTENTION_BACKENDS}
    overrides = json.loads(model.options.get("json_model_override_args") or "{}")
    if "context_length" in model.options and not is_same_for_any_length({**model.config, **overrides}):
        options["context_length"] = model.options["context_length"]
    return [f"{name}={json.dumps(value, sort_keys=True, default=str)}" for name, value in sorted(options.items())]


def _file_digest(name: str, path: str, after: float | None) -> str:
    """Digest of the content of a small file that an argument names."""
    try:
        if after is not None:
            check_unchanged_since(stamps([Path(path)]), after)
        return sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise unknown_weights(f"{_flag(name)} {path} cannot be read ({error})") from error


def _hub_cache(model: ModelSource) -> str | None:
    return model.options.get("download_dir")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_source(model: ModelSource) -> None:
    """Raises `ConfigError` if SGLang reads the weights elsewhere than where the model's path says."""
    formats = [model.load_format, model.options.get("speculative_draft_load_format") or "auto"]
    for load_format in formats:
        if load_format not in FORMATS:
            raise unknown_weights(f"load_format is {load_format}")
    for name in ELSEWHERE:
        if name in model.options:
            raise unknown_weights(f"{_flag(name)} is {model.options[name]}")
    extra = model.options.get("model_loader_extra_config") or "{}"
    if set(json.loads(extra)) - HARMLESS_LOADER_OPTIONS:
        raise unknown_weights(f"model_loader_extra_config is {extra}")


def identity_across_engines(
    model: ModelSource,
    config: Mapping[str, Any],
    *,
    model_id: str,
    kv_dtype: str,
    shards: Mapping[str, tuple[int, int]],
) -> str:
    """Identity of KV that engines of other kinds may share (`share_across_engines`).

    `config` is that of `used_config`, `model_id` the configured identity, or empty. Raises `ConfigError` if the KV of
    this engine is not known to be the same in other engines, or each rank has only a share of it.
    """
    if shards:
        kinds = ", ".join(f"{kind} {size}" for kind, (_, size) in shards.items())
        raise ConfigError(
            f"share_across_engines: each rank of SGLang keeps pages of its own share ({kinds}), and other engines keep "
            "whole chunks; use one rank, or set it to false",
            key="share_across_engines",
        )
    if model.adapters or (others := sorted(model.options.keys() & set(COMPUTED_BY))):
        reason = "adapters that SGLang begins with" if model.adapters else ", ".join(map(_flag, others))
        raise ConfigError(
            f"share_across_engines: other engines do not know of {reason}; unset them, or set it to false",
            key="share_across_engines",
        )
    if not model_id:
        _check_source(model)
    return shared_identity(
        config,
        WeightsSource(
            model=model.path,
            commit=config.get("_commit_hash") or model.revision,
            loaded_after=model.loaded_after,
        ),
        model_id=model_id,
        kv_dtype=kv_dtype,
        quantization=model.quantization,
    )
