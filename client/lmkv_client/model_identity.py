"""The identity of a model's weights, from its configuration and its files. For engines of any kind; imports none.

An engine's KV is its own: other engines may compute other bytes from the same weights. With `share_across_engines`, all
engines use `shared_identity`, which has no engine in it and refuses what not every engine computes alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmkv.errors import ConfigError
from lmkv.packing import pack_fields
from lmkv_client.file_digests import Stamp, check_unchanged_since, digests, stamps

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
OTHER_SUFFIXES = (".index.json", "quant_config.json", "quantize_config.json", "quantization_config.json", ".py")
"""Ends of the names of other files that decide what is computed: which weight files are read, how they were quantized,
and the model's own code."""
ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file beside the weights of a LoRA adapter that says how they are used."""
ADAPTER_IRRELEVANT = ("base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version")
"""Entries of it that do not change what is computed."""
OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Files beside the weights that no engine reads."""
MAX_ADAPTERS = 4096
"""Most LoRA adapters whose files an engine remembers, unless it keeps more in memory; those used last stay."""
VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
"""Entries of a model's configuration that do not change what it computes, or that KvSpec holds by itself."""

_COMMIT = re.compile("[0-9a-f]{40}")  # not a branch: its commits differ over time

SHARED_DTYPES = ("float32", "bfloat16", "float16")
"""KV dtypes of chunks that engines of several kinds share: others have scales that each engine keeps in its own way."""
SHARED_ROTARY_FORMS: Mapping[str, str] = {"llama": "halves", "mistral": "halves", "qwen2": "halves", "qwen3": "halves"}
"""Rotary form by `model_type`: which elements of a key are rotated together. `halves`: element i and i + head_dim / 2.

Only models whose keys were compared between engines (tests/engines/test_across_engines.py)."""
SHARED_ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds of rotary scaling that give a token the same key in a prompt of any length, in every engine."""
SAME_FOR_ANY_LENGTH = ("default", "linear", "llama3", "mrope", "yarn")
"""Kinds of rotary scaling that do not depend on the longest prompt for which an engine is configured."""
SHARED_FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
)
"""Entries of the configuration that decide about KV; equal configurations of other versions have others besides."""


def architecture(config: Mapping[str, Any]) -> str:
    """All of a model's configuration that may change what it computes, as JSON. `config` is its `to_dict()`."""
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    return json.dumps(kept, sort_keys=True, default=str)


def digest_of(*fields: str) -> str:
    """32 hexadecimal digits that identify a sequence of texts."""
    return sha256(pack_fields(field.encode() for field in fields)).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """The place from which an engine has loaded the weights of a model."""

    model: str
    """A folder, or the name of a hub model."""
    commit: str | None = None
    """The commit of a hub model if it is known; else it is that of `revision` in the hub's `cache`."""
    revision: str | None = None
    cache: str | None = None
    loaded_after: float | None = None
    """The weights were loaded after this time, in seconds since 1970; None if that is not known."""

    @property
    def is_identified(self) -> bool:
        """Whether it is a folder, or a hub model of a known commit."""
        return bool(self.model and Path(self.model).exists()) or bool(_COMMIT.fullmatch(self.commit or ""))

    def identity(self) -> str:
        """Identity of the weights: a digest over a local folder, or `name@commit` of a hub model.

        Raises `ConfigError` if it is not known what the weights are, and as `folder_digest`.
        """
        if "://" in self.model:
            raise unknown_weights(f"the weights are at {self.model}")
        folder = Path(self.model)
        if folder.exists():
            return folder_digest(folder, loaded_after=self.loaded_after)
        if self.is_identified:
            return f"{self.model}@{self.commit}"
        return f"{self.model}@{cached_snapshot(self.model, self.revision or self.commit or 'main', self.cache).name}"


def unknown_weights(reason: str) -> ConfigError:
    """The error of an engine whose weights cannot be identified."""
    return ConfigError(
        f"{reason}, which does not identify them: set model_id to a name of these weights", key="model_id"
    )


def cached_snapshot(model: str, revision: str, cache: str | None) -> Path:
    """The folder of a hub model that was downloaded, which is named by its commit. Raises `ConfigError` without one."""
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not there, or not a name of the hub
        folder = Path()
    if not _COMMIT.fullmatch(folder.name):
        raise unknown_weights(f"the commit of {model} is not known, only the revision {revision}")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that decide what its model computes, besides `config.json`; or the file itself."""
    if not folder.is_dir():
        return [folder]
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith((*WEIGHT_SUFFIXES, *OTHER_SUFFIXES)) and path.name not in OF_TRAINING and path.is_file()
    )


def folder_digest(folder: Path, *, loaded_after: float | None = None) -> str:
    """Digest over names and contents of the weight files of a folder, or of a single file.

    Raises `ConfigError` if there are none, or if one has changed after `loaded_after`, in seconds since 1970.
    """
    stamped = stamps(weight_files(folder))
    if not any(path.name.endswith(WEIGHT_SUFFIXES) for path in stamped):
        raise unknown_weights(f"the folder {folder} has no weights")
    if loaded_after is not None:
        check_unchanged_since(stamped, loaded_after)
    return digest_of_files(stamped)


def digest_of_files(stamped: Mapping[Path, Stamp]) -> str:
    """Digest over names and contents of files that have these stamps. Raises as `digests`."""
    found = digests(stamped)
    return digest_of(*(field for path in sorted(found) for field in (path.name, found[path])))


def adapter_digest(config: Path, weights: Mapping[Path, Stamp], *fields: str) -> str:
    """Digest of a LoRA adapter: of its configuration, of files that have these stamps, and of what else is given.

    Raises `OSError` and `ValueError` for a configuration that cannot be read, and as `digests`.
    """
    content = json.loads(config.read_bytes())
    kept = {name: value for name, value in content.items() if name not in ADAPTER_IRRELEVANT}
    return digest_of(json.dumps(kept, sort_keys=True), *fields, digest_of_files(weights))


def is_same_for_any_length(config: Mapping[str, Any]) -> bool:
    """Whether the rotary embedding is the same for each length for which an engine may be configured.

    `config` is a model's configuration, or a part of it; earlier versions of transformers had other names in it.
    """
    parts = [config, *(config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict))]
    found = [part.get("rope_parameters") or part.get("rope_scaling") or {} for part in parts]
    by_layer = [one for each in found for one in each.values() if isinstance(one, dict)] + found
    kinds = {one.get("rope_type") or one.get("type") or "default" for one in by_layer}
    return kinds <= set(SAME_FOR_ANY_LENGTH)


def shared_identity(
    config: Mapping[str, Any],
    weights: WeightsSource,
    *,
    model_id: str,
    kv_dtype: str,
    quantization: str | None = None,
) -> str:
    """Identity of KV that engines of any kind may share: of weights, sizes and rotary form, without an engine.

    `config` is the model's configuration as the engine uses it (`to_dict()`), `model_id` the configured identity, or
    empty. Raises `ConfigError` for what engines do not, or are not known to, compute alike, and as
    `WeightsSource.identity`.
    """
    kind = str(config.get("model_type"))
    rotary = _rotary(config)
    scaling = rotary.get("rope_type")
    refusals = {
        f"model_type {kind} is not known to have the same keys in each engine, only "
        f"{', '.join(sorted(SHARED_ROTARY_FORMS))}": kind not in SHARED_ROTARY_FORMS,
        f"rope_type {scaling} gives tokens keys that depend on the engine or on the prompt's length; known are "
        f"{', '.join(SHARED_ROPE_TYPES)}": scaling not in SHARED_ROPE_TYPES,
        f"KV of {kv_dtype} has scales that each engine keeps in its own way; use {', '.join(SHARED_DTYPES)}": (
            kv_dtype not in SHARED_DTYPES
        ),
        "engines compute with quantized weights in different ways": bool(
            quantization or config.get("quantization_config")
        ),
        "some layers have a sliding window": bool(config.get("sliding_window")),
        f"the commit of {weights.model} is not known; load it by its commit, or set model_id": (
            not model_id and not weights.is_identified
        ),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ConfigError(f"share_across_engines: {reason}", key="share_across_engines")
    sizes = {name: config.get(name) for name in SHARED_FIELDS}
    sizes["head_dim"] = sizes["head_dim"] or int(config["hidden_size"]) // int(config["num_attention_heads"])
    fields = [json.dumps(part, sort_keys=True, default=str) for part in (sizes, rotary)]
    return "shared:" + digest_of(*fields, SHARED_ROTARY_FORMS[kind], model_id or weights.identity())


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding by their names of today; earlier versions of transformers had others."""
    own = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = own.pop("rope_type", None) or own.pop("type", None) or "default"
    own.pop("type", None)
    own.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    own.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    numbers = {name: float(value) if isinstance(value, int | float) else value for name, value in own.items()}
    return {"rope_type": str(kind), **numbers}
