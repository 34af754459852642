"""The identity of a model's weights, from its configuration and its files. For engines of any kind; imports none.

An engine's KV is its own: other engines may compute other bytes from the same weights. With `share_across_engines`, all
engines use `shared_identity`, which has no engine in it and refuses what not every engine computes alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from lmkv.errors import ConfigError
from lmkv.packing import pack_fields

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLE_COUNT = 256
SAMPLE_BYTES = 16 << 10
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


def weights_identity(model: str, commit: str | None) -> str:
    """Identity of the weights of a model: a digest over a local folder, or `name@commit` of a hub model."""
    folder = Path(model)
    return folder_digest(folder) if folder.exists() else f"{model}@{commit or 'main'}"


def folder_digest(folder: Path) -> str:
    """Digest over the weight files of a folder, or over a single file: names, sizes, and samples spread over each file.

    Reading all of a large model would take minutes; weights of another training run differ in every sample.
    """
    inside = folder.iterdir() if folder.is_dir() else [folder]
    files = sorted(path for path in inside if path.suffix in WEIGHT_SUFFIXES)
    return _files_digest(tuple((path, (status := path.stat()).st_size, status.st_mtime_ns) for path in files))


@lru_cache(maxsize=256)
def _files_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Digest over files that have these sizes and were changed at these times: adapters are replaced in place."""
    digest = sha256()
    for path, size, _ in files:
        digest.update(pack_fields([path.name.encode(), str(size).encode()]))
        with path.open("rb") as file:
            for sample in range(SAMPLE_COUNT):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // max(1, SAMPLE_COUNT - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def shared_identity(
    config: Mapping[str, Any],
    *,
    model: str,
    commit: str | None,
    model_id: str,
    kv_dtype: str,
    quantization: str | None = None,
) -> str:
    """Identity of KV that engines of any kind may share: of weights, sizes and rotary form, without an engine.

    `config` is the model's configuration as the engine uses it (`to_dict()`), `model` its folder or name, `model_id`
    the configured identity, or empty. Raises `ConfigError` for what engines do not, or are not known to, compute alike.
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
        f"the commit of {model} is not known; load it by its commit, or set model_id": (
            not model_id and not (model and Path(model).exists()) and not _COMMIT.fullmatch(commit or "")
        ),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ConfigError(f"share_across_engines: {reason}", key="share_across_engines")
    sizes = {name: config.get(name) for name in SHARED_FIELDS}
    sizes["head_dim"] = sizes["head_dim"] or int(config["hidden_size"]) // int(config["num_attention_heads"])
    fields = [json.dumps(part, sort_keys=True, default=str) for part in (sizes, rotary)]
    return "shared:" + digest_of(*fields, SHARED_ROTARY_FORMS[kind], model_id or weights_identity(model, commit))


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding by their names of today; earlier versions of transformers had others."""
    own = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = own.pop("rope_type", None) or own.pop("type", None) or "default"
    own.pop("type", None)
    own.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    own.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    numbers = {name: float(value) if isinstance(value, int | float) else value for name, value in own.items()}
    return {"rope_type": str(kind), **numbers}
