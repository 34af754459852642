"""SGLang's KV cache in host memory as pages of lmkv's copy kernels. Pure: tensors are only measured.

Each layer has a tensor `[slot, head, element]` of keys and one of values, or with MLA one of latents, with one head.
Page p has the slots from p * page_size on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lmkv.errors import ConfigError
from lmkv_client.sglang.host_pool import LayerTensors

BUFFERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
)
"""Attributes with the tensors of the layers, by the name of the pool's class. Its subclasses keep something else."""
SCALES = ("k_scale_buffer", "native_k_scale_buffer")
"""Attributes with scales of quantized pages, or None."""


class UnknownPool(ValueError):
    """The KV cache is not of a kind that lmkv can copy."""


def device_tensors(pool: Any, page_size: int) -> LayerTensors:
    """Views of the layers, each `[pages, heads, tokens of a page, elements]`: keys, then values; or latents alone.

    Raises `UnknownPool`, or `ConfigError` if they are not in host memory.
    """
    kind = type(pool).__name__
    if kind not in BUFFERS:
        raise UnknownPool(f"a KV cache {kind}")
    if any(getattr(pool, name, None) is not None for name in SCALES):
        raise UnknownPool("a KV cache with scales")
    parts = [getattr(pool, name, None) for name in BUFFERS[kind]]
    if not all(part and all(layer.dim() == 3 for layer in part) for part in parts):
        raise UnknownPool(f"a KV cache {kind} of other tensors than [slot, head, element]")
    devices = {str(layer.device) for part in parts for layer in part or () if layer.device.type != "cpu"}
    if devices:
        raise ConfigError(
            f"LmkvLinker: the KV cache is on {', '.join(sorted(devices))}, and this version of lmkv links KV caches in "
            "host memory only; use the storage backend LmkvStorage"
        )
    return [[_by_page(layer, page_size) for layer in part] for part in parts if part]


def _by_page(layer: Any, page_size: int) -> Any:
    page_count = layer.shape[0] // page_size
    return layer[: page_count * page_size].unflatten(0, (page_count, page_size)).transpose(1, 2)
