"""Where an engine's KV-cache blocks lie in memory, and which of them go to or come from which chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WORD_BYTES = 8
"""Checksums are over 8-byte words, so everything lies at multiples of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """The KV-cache pages of one tensor-parallel rank, for blocks that are moved whole.

    The tile of block `b` and the rank's head `h` is `tile_bytes` long and begins, in each layer, at
    `layer_address + b * block_stride_bytes + h * head_stride_bytes`. Whoever makes it vouches for the addresses, and
    keeps the memory alive while it is used. Raises `ValueError` if the fields contradict each other.
    """

    layer_addresses: tuple[int, ...]
    """Address of block 0, head 0 of each layer, in the order of the layers."""
    block_stride_bytes: int
    head_stride_bytes: int
    tile_bytes: int
    """Bytes of one block of one head."""
    head_count: int
    """KV heads of this rank."""
    first_head: int
    """The rank's first head, counted over the whole model."""
    kv_head_count: int
    """KV heads of the whole model."""
    block_count: int
    """Blocks per layer: block ids are below this."""

    def __post_init__(self) -> None:
        if not self.layer_addresses:
            raise ValueError("layer_addresses is empty")
        for name in ("tile_bytes", "head_count", "kv_head_count", "block_count"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("block_stride_bytes", "head_stride_bytes", "tile_bytes"):
            if getattr(self, name) % WORD_BYTES:
                raise ValueError(f"{name} must be a multiple of {WORD_BYTES}, not {getattr(self, name)}")
        for layer, address in enumerate(self.layer_addresses):
            if address <= 0 or address % WORD_BYTES:
                raise ValueError(f"layer_addresses[{layer}] is {address:#x}, not a multiple of {WORD_BYTES} above 0")
        if self.first_head < 0 or self.first_head + self.head_count > self.kv_head_count:
            raise ValueError(
                f"heads {self.first_head} to {self.first_head + self.head_count - 1} (first_head, head_count) "
                f"are not among the model's {self.kv_head_count}"
            )
        self._check_apart()

    def _check_apart(self) -> None:
        """No two tiles may overlap, whichever of block and head is the outer dimension."""
        dimensions = (
            ("block_stride_bytes", self.block_stride_bytes, self.block_count),
            ("head_stride_bytes", self.head_stride_bytes, self.head_count),
        )
        span = self.tile_bytes
        for name, stride, count in sorted(dimensions, key=lambda dimension: dimension[1]):
            if count > 1 and stride < span:
                raise ValueError(f"{name} {stride} makes tiles overlap: it must be at least {span}")
            span += (count - 1) * stride

    def extent_bytes(self, block_count: int) -> int:
        """Bytes of a chunk of so many blocks: all layers, all heads of the model."""
        return len(self.layer_addresses) * self.kv_head_count * block_count * self.tile_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCopy:
    """Some blocks of one chunk: the pages' `block_ids` are blocks `first_block`, `first_block + 1`, ... of it."""

    offset: int
    """Where the chunk's extent begins in the pool, in bytes."""
    extent_block_count: int
    """Blocks of the whole chunk."""
    block_ids: Sequence[int]
    first_block: int = 0
    """First block of the chunk to copy; the blocks before it are left alone."""


class _Device(Protocol):
    @property
    def type(self) -> str: ...


class PageTensor(Protocol):
    """What `pages_from_tensors` asks of a tensor; `torch.Tensor` has it."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> _Device: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


def pages_from_tensors(tensors: Sequence[PageTensor], first_head: int, kv_head_count: int) -> Pages:
    """Pages of KV-cache tensors in CPU memory, one per layer, each `[blocks, heads, block size, content]`.

    Blocks and heads may have any stride; block size and content must be contiguous. The tensors must outlive the pages.
    Raises `ValueError` if a tensor cannot be moved by whole tiles, or is not laid out like the first.
    """
    if not tensors:
        raise ValueError("tensors is empty")
    layouts = [_layout(tensor, layer) for layer, tensor in enumerate(tensors)]
    for layer, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(f"tensor {layer} is laid out unlike tensor 0: {layout} and {layouts[0]}")
    (block_count, head_count, block_size, content), (block_stride, head_stride), element_bytes = layouts[0]
    return Pages(
        layer_addresses=tuple(tensor.data_ptr() for tensor in tensors),
        block_stride_bytes=block_stride * element_bytes,
        head_stride_bytes=head_stride * element_bytes,
        tile_bytes=block_size * content * element_bytes,
        head_count=head_count,
        first_head=first_head,
        kv_head_count=kv_head_count,
        block_count=block_count,
    )


_Layout = tuple[tuple[int, ...], tuple[int, int], int]


def _layout(tensor: PageTensor, layer: int) -> _Layout:
    """Shape, strides of block and head in elements, bytes per element."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.device.type != "cpu":
        raise ValueError(f"tensor {layer} is on {tensor.device.type}, not in CPU memory")
    if len(shape) != 4:
        raise ValueError(f"tensor {layer} has shape {shape}, not [blocks, heads, block size, content]")
    block_size, content = shape[2:]
    if (content > 1 and strides[3] != 1) or (block_size > 1 and strides[2] != content):
        raise ValueError(f"tensor {layer} has strides {strides}: the tiles of shape {shape[2:]} are not contiguous")
    # A dimension of one has no stride worth the name: torch lets it be anything.
    head_stride = strides[1] if shape[1] > 1 else block_size * content
    block_stride = strides[0] if shape[0] > 1 else shape[1] * head_stride
    return shape, (block_stride, head_stride), tensor.element_size()
