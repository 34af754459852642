"""The memory layout of an engine's paged KV, as addresses and strides, from tensors of any of vLLM's layouts.

A *tile* is one block of one head. It consists of *parts* (keys and values, or one latent) of *rows* (one per token); an
opaque tile is one part of one row. docs/contribute/kernels.md has a drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

WORD_BYTES = 8
"""Checksums are computed over 8-byte words, so rows are multiples of it."""
MAX_PARTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePart:
    """Offset of a part in a tile, and the strides of its rows and elements, in bytes."""

    offset: int
    row_stride: int
    element_stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """The KV-cache pages of one tensor-parallel rank.

    Element `e` of row `r` of part `p` in block `b` of the rank's head `h` is, in each layer, at `layer_address +
    b * block_stride_bytes + h * head_stride_bytes + parts[p].offset + r * parts[p].row_stride +
    e * parts[p].element_stride`. The caller must keep the memory alive. Raises `ValueError` if the fields
    contradict each other, or two elements would share memory.
    """

    layer_addresses: tuple[int, ...]
    """Address of block 0, head 0 of each layer, in layer order."""
    block_count: int
    """Blocks per layer; block ids are below it."""
    block_stride_bytes: int
    head_stride_bytes: int
    rows_per_block: int
    row_tokens: int = 1
    """Tokens per row: 1, the block size for opaque tiles, or the chunk size for states."""
    row_bytes: int
    element_bytes: int
    parts: tuple[TilePart, ...]
    head_count: int
    """KV heads of this rank."""
    first_head: int
    """Index of the rank's first head in the model."""
    kv_head_count: int
    """KV heads of the whole model."""
    device: str = "cpu"
    """Device of the memory, as torch names it."""
    first_layer: int = 0
    """Index of the first of these layers in a chunk: a chunk may have layers that are kept elsewhere, too."""
    layer_count: int = 0
    """Layers of a chunk; 0: these."""

    def __post_init__(self) -> None:
        if not self.layer_addresses:
            raise ValueError("layer_addresses is empty")
        for name in ("block_count", "rows_per_block", "row_tokens", "row_bytes", "head_count", "kv_head_count"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.element_bytes not in (1, 2, 4, 8):
            raise ValueError(f"element_bytes must be 1, 2, 4 or 8, not {self.element_bytes}")
        if not 1 <= len(self.parts) <= MAX_PARTS:
            raise ValueError(f"there may be 1 to {MAX_PARTS} parts, not {len(self.parts)}")
        if self.first_head < 0 or self.first_head + self.head_count > self.kv_head_count:
            raise ValueError(
                f"heads {self.first_head} to {self.first_head + self.head_count - 1} (first_head, head_count) "
                f"are not among the model's {self.kv_head_count}"
            )
        if not 0 <= self.first_layer <= self.chunk_layers - len(self.layer_addresses):
            raise ValueError(
                f"layers {self.first_layer} to {self.first_layer + len(self.layer_addresses) - 1} (first_layer, "
                f"layer_addresses) are not among a chunk's {self.chunk_layers}"
            )
        self._check_words()
        self._check_apart()

    @property
    def chunk_layers(self) -> int:
        return self.layer_count or len(self.layer_addresses)

    @property
    def lacks_layers(self) -> bool:
        """Whether a chunk has other layers, too."""
        return self.chunk_layers > len(self.layer_addresses)

    @property
    def first_chunk_head(self) -> int:
        """Index of the first of these heads, counted over the heads of all layers of a chunk."""
        return self.first_layer * self.kv_head_count + self.first_head

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.rows_per_block * self.row_tokens

    def row_count(self, token_count: int) -> int:
        """Number of rows of `token_count` tokens."""
        return -(-token_count // self.row_tokens)

    def extent_bytes(self, token_count: int) -> int:
        """Bytes of a chunk of `token_count` tokens: all of its layers, and all heads of the model."""
        rows = self.row_count(token_count)
        return self.chunk_layers * self.kv_head_count * len(self.parts) * rows * self.row_bytes

    def geometry(self) -> tuple[int, ...]:
        """The fields of `lmkv::Pages` except the number of layers."""
        parts = [(part.offset, part.row_stride, part.element_stride) for part in self.parts]
        parts += [(0, 0, 0)] * (MAX_PARTS - len(parts))
        return (
            self.block_stride_bytes,
            self.head_stride_bytes,
            self.rows_per_block,
            self.row_bytes,
            self.element_bytes,
            self.head_count,
            self.first_chunk_head,
            self.kv_head_count,
            len(self.parts),
            *(number for part in parts for number in part),
        )

    def is_contiguous(self, part: TilePart) -> bool:
        """Whether the rows of the part are contiguous."""
        return part.element_stride == self.element_bytes

    def _check_words(self) -> None:
        words = {name: getattr(self, name) for name in ("block_stride_bytes", "head_stride_bytes", "row_bytes")}
        words |= {f"layer_addresses[{layer}]": address for layer, address in enumerate(self.layer_addresses)}
        for index, part in enumerate(self.parts):
            words[f"parts[{index}].offset"] = part.offset
            if self.is_contiguous(part):
                words[f"parts[{index}].row_stride"] = part.row_stride if self.rows_per_block > 1 else 0
            elif part.row_stride != self.element_bytes:
                raise ValueError(f"parts[{index}] has gaps between elements both along a row and from row to row")
        for name, value in words.items():
            if value < 0 or value % WORD_BYTES or (name.startswith("layer") and not value):
                raise ValueError(f"{name} is {value}, not a multiple of {WORD_BYTES} from 0 up")

    def _check_apart(self) -> None:
        """Raises `ValueError` if two elements share memory, for any order of the dimensions."""
        elements = self.row_bytes // self.element_bytes
        outer = [
            ("block_stride_bytes", self.block_stride_bytes, self.block_count),
            ("head_stride_bytes", self.head_stride_bytes, self.head_count),
        ]
        inside = [
            [("element_stride", part.element_stride, elements), ("row_stride", part.row_stride, self.rows_per_block)]
            for part in self.parts
        ]
        first, *others = self.parts
        if all((o.row_stride, o.element_stride) == (first.row_stride, first.element_stride) for o in others):
            between = [("parts[1].offset", other.offset - first.offset, 2) for other in others]
            _span([*inside[0], *between, *outer], self.element_bytes)
            return
        end = 0  # parts of different strides are packed one after the other
        for part, dimensions in sorted(zip(self.parts, inside, strict=True), key=lambda pair: pair[0].offset):
            if part.offset < end:
                raise ValueError(f"offset {part.offset} makes parts overlap: it must be at least {end}")
            end = part.offset + _span(dimensions, self.element_bytes)
        _span(outer, end)


def _span(dimensions: Sequence[tuple[str, int, int]], size_bytes: int) -> int:
    """Bytes that items of `size_bytes` span; each dimension is a name, a stride and a count.

    Raises `ValueError` if two items overlap.
    """
    for name, stride, count in sorted(dimensions, key=lambda dimension: dimension[1]):
        if count > 1 and stride < size_bytes:
            raise ValueError(f"{name} {stride} makes tiles overlap: it must be at least {size_bytes}")
        size_bytes += (count - 1) * stride
    return size_bytes


class _TensorDevice(Protocol):
    @property
    def type(self) -> str: ...


class PageTensor(Protocol):
    """The part of `torch.Tensor` that pages are made from."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def device(self) -> _TensorDevice: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


def whole_tiles(
    tensors: Sequence[PageTensor], first_head: int, kv_head_count: int, *, first_layer: int = 0, layer_count: int = 0
) -> Pages:
    """Pages with opaque tiles.

    `tensors` are one per layer, each `[blocks, heads, block size, content]`. Blocks and heads may have any stride; each
    tile must be contiguous. They are the layers of a chunk from `first_layer` on; a `layer_count` of 0 means that it
    has no others. The tensors must outlive the pages. Raises `ValueError` if a tile is not contiguous, or a tensor has
    another layout than the first.
    """
    layout = _layout(tensors, first_layer, layer_count)
    if not layout.tiles_are_contiguous:
        raise ValueError(f"the tiles of shape {layout.shape[2:]} are not contiguous: strides {layout.strides}")
    return layout.pages(
        first_head,
        kv_head_count,
        rows_per_block=1,
        row_tokens=layout.block_size,
        row_elements=layout.block_size * layout.content,
        parts=[(0, layout.block_size * layout.content, 1)],
    )


def token_rows(
    tensors: Sequence[PageTensor],
    first_head: int,
    kv_head_count: int,
    *,
    part_count: int = 2,
    first_layer: int = 0,
    layer_count: int = 0,
) -> Pages:
    """Pages with the key and value of a token side by side: all layouts of vLLM on GPUs.

    `tensors` are one per layer, each `[blocks, heads, block size, content]` with contiguous content: key, then value;
    or with a `part_count` of 1 one latent (MLA). The rest is as for `whole_tiles`.
    """
    layout = _layout(tensors, first_layer, layer_count)
    if layout.content % part_count:
        raise ValueError(f"a content of {layout.content} elements cannot be {part_count} parts")
    size = layout.content // part_count
    return layout.pages(
        first_head,
        kv_head_count,
        rows_per_block=layout.block_size,
        row_elements=size,
        parts=[(part * size, layout.token_stride, 1) for part in range(part_count)],
    )


def separate_rows(
    keys: Sequence[PageTensor],
    values: Sequence[PageTensor],
    first_head: int = 0,
    kv_head_count: int = 0,
    *,
    first_layer: int = 0,
    layer_count: int = 0,
) -> list[Pages]:
    """Pages with keys and values in tensors of their own. Each of the pages has a share of every chunk.

    `keys` and `values` have one tensor per layer, each `[blocks, heads, block size, head size]` with contiguous
    content, all of one layout. A `kv_head_count` of 0 means the heads of the tensors. The rest is as for `whole_tiles`.
    The chunks are the same as those of `token_rows`: copy with all of the pages, and add up the checksums.
    """
    layouts = _layout(keys, first_layer, layer_count), _layout(values, first_layer, layer_count)
    key, value = layouts
    if replace(key, addresses=()) != replace(value, addresses=()) or len(keys) != len(values):
        raise ValueError(f"values have another layout than keys: {value} and {key}")
    head_count = kv_head_count or key.shape[1]
    distances = {after - before for before, after in zip(key.addresses, value.addresses, strict=True)}
    if len(distances) == 1 and (distance := distances.pop()) > 0 and distance % key.element_bytes == 0:
        parts = [(part * distance // key.element_bytes, key.token_stride, 1) for part in range(2)]
        with suppress(ValueError):  # the tensors lie within each other
            return [
                key.pages(first_head, head_count, rows_per_block=key.block_size, row_elements=key.content, parts=parts)
            ]
    return [
        layout.of_head(head).pages(
            2 * (first_head + head) + part,
            2 * head_count,
            rows_per_block=layout.block_size,
            row_elements=layout.content,
            parts=[(0, layout.token_stride, 1)],
        )
        for head in range(key.shape[1])
        for part, layout in enumerate(layouts)
    ]


def packed_rows(
    tensors: Sequence[PageTensor], first_head: int, kv_head_count: int, *, first_layer: int = 0, layer_count: int = 0
) -> Pages:
    """Pages of vLLM's CPU attention kernels `vec` and `vec16`: keys with the tokens innermost, then values.

    All is as for `whole_tiles`; the content of the tiles does not follow their shape.
    """
    layout = _layout(tensors, first_layer, layer_count)
    if not layout.tiles_are_contiguous or layout.content % 2:
        raise ValueError(f"tiles of shape {layout.shape[2:]} and strides {layout.strides[2:]} are not packed so")
    size, tokens = layout.content // 2, layout.block_size
    return layout.pages(
        first_head,
        kv_head_count,
        rows_per_block=tokens,
        row_elements=size,
        parts=[(0, 1, tokens), (tokens * size, size, 1)],
    )


def whole_states(
    tensors: Sequence[PageTensor],
    first_head: int,
    kv_head_count: int,
    *,
    chunk_tokens: int,
    first_layer: int = 0,
    layer_count: int = 0,
) -> Pages:
    """Pages of recurrent states: a block has one state, which is one row of a chunk of `chunk_tokens` tokens.

    `tensors` are one per layer, each `[blocks, 1, 1, state]`; blocks may have any stride, so that what follows a state
    is not copied. What one rank has of a state counts as a head, and `kv_head_count` is the number of such shares. The
    rest is as for `whole_tiles`.
    """
    layout = _layout(tensors, first_layer, layer_count)
    if layout.shape[1:3] != (1, 1):
        raise ValueError(f"tensor 0 has shape {layout.shape}, not [blocks, 1, 1, state]")
    return layout.pages(
        first_head,
        kv_head_count,
        rows_per_block=1,
        row_tokens=chunk_tokens,
        row_elements=layout.content,
        parts=[(0, layout.content, 1)],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """The common layout of the layers' tensors; strides in elements."""

    addresses: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    device: str
    first_layer: int
    layer_count: int

    def of_head(self, head: int) -> _Layout:
        """The layout of one head alone."""
        offset = head * self.strides[1] * self.element_bytes
        addresses = tuple(address + offset for address in self.addresses)
        return replace(self, addresses=addresses, shape=(self.shape[0], 1, *self.shape[2:]))

    @property
    def block_size(self) -> int:
        return self.shape[2]

    @property
    def content(self) -> int:
        return self.shape[3]

    @property
    def token_stride(self) -> int:
        return self.strides[2]

    @property
    def tiles_are_contiguous(self) -> bool:
        return self.block_size == 1 or self.token_stride == self.content

    def pages(
        self,
        first_head: int,
        kv_head_count: int,
        *,
        rows_per_block: int,
        row_elements: int,
        parts: Sequence[tuple[int, int, int]],
        row_tokens: int = 1,
    ) -> Pages:
        """Makes pages from sizes in elements; a part is offset, row stride and element stride."""
        size = self.element_bytes
        return Pages(
            layer_addresses=self.addresses,
            block_count=self.shape[0],
            block_stride_bytes=self.strides[0] * size,
            head_stride_bytes=self.strides[1] * size,
            rows_per_block=rows_per_block,
            row_tokens=row_tokens,
            row_bytes=row_elements * size,
            element_bytes=size,
            parts=tuple(
                TilePart(offset=offset * size, row_stride=row * size, element_stride=element * size)
                for offset, row, element in parts
            ),
            head_count=self.shape[1],
            first_head=first_head,
            kv_head_count=kv_head_count,
            device=self.device,
            first_layer=self.first_layer,
            layer_count=self.layer_count,
        )


def _layout(tensors: Sequence[PageTensor], first_layer: int, layer_count: int) -> _Layout:
    if not tensors:
        raise ValueError("tensors is empty")
    layouts = [
        (_shape(tensor, layer), tensor.element_size(), str(tensor.device)) for layer, tensor in enumerate(tensors)
    ]
    for layer, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(f"tensor {layer} has another layout than tensor 0: {layout} and {layouts[0]}")
    (shape, strides), element_bytes, device = layouts[0]
    return _Layout(
        addresses=tuple(tensor.data_ptr() for tensor in tensors),
        shape=shape,
        strides=strides,
        element_bytes=element_bytes,
        device=device,
        first_layer=first_layer,
        layer_count=layer_count,
    )


def _shape(tensor: PageTensor, layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides. A dimension of size 1, whose stride torch leaves undefined, gets a valid one."""
    shape, strides = tuple(tensor.shape), list(tensor.stride())
    if len(shape) != 4:
        raise ValueError(f"tensor {layer} has shape {shape}, not [blocks, heads, block size, content]")
    if shape[3] > 1 and strides[3] != 1:
        raise ValueError(f"tensor {layer} has strides {tuple(strides)}: its content is not contiguous")
    spans = [size * stride for size, stride in zip(shape, strides, strict=True) if size > 1]
    for dimension, size in enumerate(shape):
        if size == 1:
            strides[dimension] = max(spans, default=shape[3])
    strides[3] = 1
    return shape, tuple(strides)
