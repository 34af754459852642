"""The KvSpec of an SGLang engine: what decides whether its pages are of use to another one.

SGLang's keys name the tokens of a page and all before them, and nothing else: model, dtype and the rank's share of the
KV cache are separated by the spec. The layout of the host pool is not: chunks have one order of bytes for all layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmkv.errors import ConfigError
from lmkv.keys import PAGE_HASH_SCHEME
from lmkv.spec import KvSpec
from lmkv_client.model_identity import architecture, digest_of, shared_identity, unknown_weights, weights_identity
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


def make_spec(
    tensors: Sequence[Sequence[torch.Tensor]],
    *,
    model_name: str,
    model_id: str,
    kv_dtype: str,
    page_size: int,
    shards: Mapping[str, tuple[int, int]],
    weight_version: str = "",
) -> KvSpec:
    """The spec of the pages of one rank.

    `tensors` are those of `pool_tensors`, and `shards` are the ranks and sizes by which the engine divides its KV cache
    (`sglang_api.shards`). `weight_version` is as configured.
    """
    layer = tensors[0][0]
    shown = "".join(f" {kind} {rank}/{size}" for kind, (rank, size) in shards.items())
    return KvSpec(
        model_name=model_name,
        model_id=model_id + shown,
        kv_dtype=kv_dtype,
        layer_count=len(tensors[0]),
        kv_head_count=layer.shape[1],
        head_size=layer.shape[3],
        chunk_size=page_size,
        mla=len(tensors) == 1,
        hash_scheme=PAGE_HASH_SCHEME,
        weight_version=weight_version,
    )


FORMATS = ("auto", "pt", "safetensors", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral", "layered")
"""Values of `--load-format` with which SGLang reads the files of the model's folder, or of a hub model."""


def identity_of(model: ModelSource) -> str:
    """Identity of the weights: of a local folder from its files, of a model of Hugging Face from name and commit.

    Those of a draft model are part of it. Raises `ConfigError` if they are not known.
    """
    _check_source(model)
    after = model.loaded_after
    weights = [weights_identity(model.path, model.revision, loaded_after=after)]
    if model.draft_path:
        weights.append(weights_identity(model.draft_path, model.draft_revision, loaded_after=after))
    return digest_of(architecture(model.config), model.dtype, model.quantization, *weights)


def _check_source(model: ModelSource) -> None:
    """Raises `ConfigError` if SGLang reads the weights elsewhere than where the model's path says."""
    if model.load_format not in FORMATS:
        raise unknown_weights(f"load_format is {model.load_format}")


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
    if not model_id:
        _check_source(model)
    return shared_identity(
        config,
        model=model.path,
        commit=config.get("_commit_hash") or model.revision,
        model_id=model_id,
        kv_dtype=kv_dtype,
        quantization=model.quantization,
        loaded_after=model.loaded_after,
    )
