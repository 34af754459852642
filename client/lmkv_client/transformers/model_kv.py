"""Describes the KV that a model of transformers keeps: the KvSpec of its chunks, found by computing one token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.spec import DTYPE_BYTES, KvSpec
from lmkv_client.file_digests import MAX_THREADS
from lmkv_client.model_identity import WeightsSource, architecture, digest_of, shared_identity
from lmkv_client.processors import PROCESSORS
from lmkv_client.transformers.inputs import has_adapters

WORD_BYTES = 8
"""A head's bytes of a token are a multiple of it: checksums are computed over words."""
READ_ELEMENTS = 1 << 22
"""Most elements of a weight tensor that are copied from a device at once, for its digest."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Kinds of rotary scaling whose frequencies transformers changes while a prompt grows (`dynamic_rope_update`)."""
REMEDY = "use the model without lmkv"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelKv:
    spec: KvSpec
    dtype: torch.dtype
    devices: tuple[torch.device, ...]
    """Finds where each layer keeps its keys and values."""


def model_kv(model: Any, config: ConnectorConfig, model_name: str) -> ModelKv:
    """The KV of a model, which computes two short prompts for it. Raises `ConfigError` if lmkv cannot keep it."""
    _check_model(model)
    past = _computed(model, [0])
    keys = [layer.keys for layer in past.layers]
    values = [layer.values for layer in past.layers]
    if any(each is None for each in keys + values):
        raise ConfigError(f"some layers of {type(model).__name__} keep no keys and values; {REMEDY}")
    shapes = {(tuple(each.shape), each.dtype) for each in keys + values}
    if len(shapes) > 1:
        raise ConfigError(f"the layers of {type(model).__name__} keep keys and values of several shapes; {REMEDY}")
    (_, head_count, _, head_size), dtype = shapes.pop()
    kv_dtype = str(dtype).removeprefix("torch.")
    if kv_dtype not in DTYPE_BYTES or head_size * DTYPE_BYTES[kv_dtype] % WORD_BYTES:
        raise ConfigError(f"heads of {head_size} elements of {kv_dtype} are not supported; {REMEDY}")
    if not _is_causal(model):
        raise ConfigError(f"a token's keys and values in {type(model).__name__} depend on later tokens; {REMEDY}")
    text_config = model.config.get_text_config(decoder=True)
    spec = KvSpec(
        model_name=model_name or model.config.name_or_path or type(model).__name__,
        model_id=_identity(model, config, kv_dtype),
        kv_dtype=kv_dtype,
        layer_count=len(keys),
        kv_head_count=head_count,
        head_size=head_size,
        chunk_size=config.chunk_size,
        hash_scheme=config.hash_scheme,
        vocab_size=text_config.vocab_size,
        weight_version=config.weight_version,
        accepts_lossy=config.accept_lossy,
    )
    return ModelKv(spec=spec, dtype=dtype, devices=tuple(each.device for each in keys))


def _computed(model: Any, token_ids: list[int]) -> DynamicCache:
    """The cache of a prompt."""
    past = new_cache(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids], device=model.device), past_key_values=past, use_cache=True)
    return past


def _is_causal(model: Any) -> bool:
    """Whether the KV of a token is the same whatever follows: two prompts that end differently have it alike."""
    first, second = (_computed(model, [0, 0, last]).layers for last in (1, 2))
    pairs = [
        (mine, other)
        for one, another in zip(first, second, strict=True)
        for mine, other in ((one.keys, another.keys), (one.values, another.values))
    ]
    return all(torch.equal(mine[:, :, :2], other[:, :, :2]) for mine, other in pairs)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache in which layers with a window keep all tokens, as chunks do; they attend to the window only."""
    past = DynamicCache(config=model.config)
    past.activate_past_recording()
    return past


def _check_model(model: Any) -> None:
    """Raises `ConfigError` if the model's KV depends on more than its weights and tokens, or is not kept per token."""
    name = type(model).__name__
    if has_adapters(model):
        raise ConfigError(f"{name} has adapters, which chunk keys cannot name yet; merge them, or {REMEDY}")
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{name} has an encoder, whose output its KV depends on; {REMEDY}")
    if getattr(model, "tp_size", None) not in (None, 1):
        raise ConfigError(f"{name} is split over {model.tp_size} processes; {REMEDY}")
    if implementation := getattr(model.generation_config, "cache_implementation", None):
        raise ConfigError(
            f"generate of {name} keeps KV in a cache of kind {implementation!r}; set "
            "model.generation_config.cache_implementation to None"
        )
    if kinds := _rope_types(model) & LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"{name} has rope_type {kinds.pop()}, by which a token's keys depend on the length of its prompt; {REMEDY}"
        )
    if not hasattr(DynamicCache, "activate_past_recording"):
        raise ConfigError("this version of transformers is too old for lmkv; install 5.19 or newer")
    layers = DynamicCache(config=model.config).layers
    if unknown := {
        type(each).__name__ for each in layers if type(each) not in (DynamicLayer, DynamicSlidingWindowLayer)
    }:
        raise ConfigError(f"{name} has layers that keep no key and value of each token: {', '.join(unknown)}; {REMEDY}")


def _rope_types(model: Any) -> set[str]:
    """Kinds of rotary scaling of all layers."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer = [one for one in parameters.values() if isinstance(one, dict)] or [parameters]
    return {str(one.get("rope_type", "default")) for one in by_layer}


def _identity(model: Any, config: ConnectorConfig, kv_dtype: str) -> str:
    """The spec's `model_id`: transformers' own, unless engines of other kinds may share the KV."""
    described = model.config.to_dict()
    if config.share_across_engines:
        return shared_identity(
            described,
            WeightsSource(model=model.config.name_or_path, commit=getattr(model.config, "_commit_hash", None)),
            model_id=config.model_id,
            kv_dtype=kv_dtype,
        )
    return "transformers:" + digest_of(architecture(described), config.model_id or weights_digest(model))


def weights_digest(model: Any) -> str:
    """Digest of all weights as they are in memory now. Raises `ConfigError` if some are elsewhere."""
    tensors = {name: each for name, each in sorted(model.state_dict().items()) if isinstance(each, torch.Tensor)}
    for name, weights in tensors.items():
        if weights.is_meta:
            raise ConfigError(f"{name} is not in memory; set model_id to a name of the weights", key="model_id")
    with ThreadPoolExecutor(min(len(PROCESSORS), MAX_THREADS)) as threads:
        found = threads.map(_tensor_digest, tensors.values())
        return digest_of(*(field for name, digest in zip(tensors, found, strict=True) for field in (name, digest)))


def _tensor_digest(weights: torch.Tensor) -> str:
    """Digest of a tensor: its shape, dtype and bytes."""
    digest = sha256(f"{tuple(weights.shape)} {weights.dtype} ".encode())
    flat = weights.detach().reshape(-1)
    for start in range(0, flat.numel(), READ_ELEMENTS):
        part = flat[start : start + READ_ELEMENTS].contiguous().cpu()
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()
