"""Copies between the tensors of a `DynamicCache` and extents of token-major chunks.

extent   [layer][kv head][key, value][token][head_size]
layer    keys and values, [1, kv head, token, head_size] each
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmkv_client.transformers.model_kv import ModelKv


def chunk_tensor(memory: memoryview, kv: ModelKv, token_count: int) -> torch.Tensor:
    """An extent of `token_count` tokens as a tensor `[layer, kv head, 2, token, head_size]` that shares its memory."""
    spec = kv.spec
    elements = torch.frombuffer(memory, dtype=torch.uint8, count=spec.size_bytes(token_count)).view(kv.dtype)
    return elements.view(spec.layer_count, spec.kv_head_count, 2, token_count, spec.head_size)


def fill(past: Any, chunks: Sequence[torch.Tensor], kv: ModelKv, token_limit: int) -> int:
    """Copies the chunks of a prompt, from its first token on, into an empty cache; returns the number of tokens.

    At most `token_limit` tokens; `chunks` are tensors of `chunk_tensor`.
    """
    for layer, device, index in zip(past.layers, kv.devices, range(kv.spec.layer_count), strict=True):
        keys, values = (
            torch.cat([chunk[index, :, part] for chunk in chunks], dim=1)[:, :token_limit].unsqueeze(0).to(device)
            for part in (0, 1)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = keys.shape[-2]
    return int(past.get_seq_length())


def has_all_tokens(past: Any, token_count: int) -> bool:
    """Whether each layer has the keys and values of the first `token_count` tokens: a window drops older ones."""
    layers = past.layers
    return all(
        layer.keys is not None and layer.keys.shape[-2] == layer.get_seq_length() >= token_count for layer in layers
    )


def copy_tokens(past: Any, first: int, chunks: Sequence[torch.Tensor]) -> None:
    """Copies the keys and values of tokens from `first` on into consecutive chunks, tensors of `chunk_tensor`."""
    total = sum(chunk.shape[3] for chunk in chunks)
    for index, layer in enumerate(past.layers):
        for part, states in enumerate((layer.keys, layer.values)):
            own = states[0, :, first : first + total].cpu()
            at = 0
            for chunk in chunks:
                chunk[index, :, part] = own[:, at : at + chunk.shape[3]]
                at += chunk.shape[3]
