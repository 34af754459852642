"""SGLang's host pool as pages of lmkv's copy kernels, in each of its layouts. Pure: tensors are only measured.

    layer_first         [layer, slot, head, element]                 page p has the slots from p * page_size on
    page_first          [slot, layer, head, element]
    page_first_direct   [page, layer, token, head, element]
    page_head           [page, head, token, layer, element]

Keys and values have a tensor each; MLA has one of latents, with one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmkv.errors import ConfigError
from lmkv_client.sglang.sglang_api import HostPool
from lmkv_kernels import Pages, separate_rows, token_rows

if TYPE_CHECKING:
    import torch

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

LayerTensors = Sequence[Sequence["torch.Tensor"]]
"""The layers of keys, then those of values; or the layers of latents alone."""


def layer_tensors(buffer: torch.Tensor, layout: str, page_size: int) -> list[torch.Tensor]:
    """Views of the layers of one buffer, each `[pages, heads, tokens of a page, elements]`.

    Raises `ConfigError` if the layout is not known.
    """
    if layout == "layer_first":
        by_page = buffer.view(buffer.shape[0], -1, page_size, *buffer.shape[2:]).transpose(2, 3)
        return [by_page[layer] for layer in range(buffer.shape[0])]
    if layout == "page_first":
        by_page = buffer.view(-1, page_size, *buffer.shape[1:])
        return [by_page[:, :, layer].transpose(1, 2) for layer in range(buffer.shape[1])]
    if layout == "page_first_direct":
        return [buffer[:, layer].transpose(1, 2) for layer in range(buffer.shape[1])]
    if layout == "page_head":
        return [buffer[:, :, :, layer] for layer in range(buffer.shape[3])]
    raise ConfigError(
        f"--hicache-mem-layout {layout}: this version of lmkv knows {', '.join(LAYOUTS)}; use one of these",
        layout=layout,
    )


def pool_tensors(pool: HostPool, *, is_mla: bool) -> LayerTensors:
    """The layers of keys and of values, or of latents, as `layer_tensors` has them. The pool must have tensors."""
    assert pool.kv_buffer is not None
    buffers = (pool.kv_buffer,) if is_mla else (pool.kv_buffer[0], pool.kv_buffer[1])
    return [layer_tensors(buffer, pool.layout, pool.page_size) for buffer in buffers]


def make_pages(tensors: LayerTensors) -> list[Pages]:
    """Pages of the copy kernels; the tensors must outlive them."""
    head_count = tensors[0][0].shape[1]
    if len(tensors) == 1:
        return [token_rows(tensors[0], 0, head_count, part_count=1)]
    keys, values = tensors
    return separate_rows(keys, values, 0, head_count)


def page_numbers(host_indices: Sequence[int], page_size: int, page_count: int) -> list[int]:
    """The pages that these slots of the host pool are.

    Raises `ValueError` unless they are `page_count` whole pages.
    """
    if len(host_indices) != page_count * page_size:
        raise ValueError(f"{len(host_indices)} slots are not {page_count} pages of {page_size} tokens")
    first_slots = host_indices[::page_size]
    if any(slot % page_size for slot in first_slots):
        raise ValueError(f"a page does not begin at a multiple of {page_size} slots")
    return [slot // page_size for slot in first_slots]
