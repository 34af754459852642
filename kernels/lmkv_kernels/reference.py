"""The specification of the kernels in plain torch: slow, simple, and equal to them bit for bit.

It uses tensors where the kernels use addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmkv_kernels.copies import ChunkCopy


@dataclass(frozen=True, kw_only=True)
class ReferencePages:
    """One rank's pages."""

    tensors: Sequence[Tensor]
    """The KV cache, one per layer, each `[blocks, heads, block size, content]` with any strides."""
    first_head: int
    kv_head_count: int
    inside: Literal["whole", "tokens", "packed"]
    """Content of a tile: opaque, or the parts of each token, or all keys as `[element, token]` and then all values."""
    part_count: int = 2
    first_layer: int = 0
    layer_count: int = 0
    """Layers of a chunk; 0: those of `tensors`."""

    def gather(self, pool: Tensor, copies: Sequence[ChunkCopy]) -> None:
        """Copies pages to the pool, of `uint8`. Does not check the copies."""
        for copy in copies:
            chunk, first, stop = self._chunk(pool, copy)
            for layer, tensor in enumerate(self.tensors):
                rows = torch.cat([self.unpack(tensor[block_id]) for block_id in copy.block_ids], dim=2)
                chunk[layer] = rows[:, :, first:stop]

    def scatter(self, pool: Tensor, copies: Sequence[ChunkCopy]) -> None:
        """Copies the pool to pages. Does not check the copies."""
        for copy in copies:
            chunk, first, stop = self._chunk(pool, copy)
            for layer, tensor in enumerate(self.tensors):
                tiles = [self.unpack(tensor[block_id]) for block_id in copy.block_ids]
                rows = torch.cat(tiles, dim=2)
                rows[:, :, first:stop] = chunk[layer]
                for block_id, tile in zip(copy.block_ids, rows.tensor_split(len(tiles), dim=2), strict=True):
                    tensor[block_id] = self.pack(tile)

    def unpack(self, tile: Tensor) -> Tensor:
        """A block `[head, block size, content]` as `[head, part, row, element]`."""
        heads, tokens, content = tile.shape
        if self.inside == "whole":
            return tile.reshape(heads, 1, 1, tokens * content)
        if self.inside == "tokens":
            return tile.reshape(heads, tokens, self.part_count, -1).transpose(1, 2)
        keys, values = tile.reshape(heads, 2, -1).unbind(1)
        return torch.stack([keys.reshape(heads, -1, tokens).transpose(1, 2), values.reshape(heads, tokens, -1)], 1)

    def pack(self, rows: Tensor) -> Tensor:
        """The inverse of `unpack`."""
        heads, tokens, content = self.tensors[0].shape[1:]
        if self.inside == "packed":
            keys, values = rows.unbind(1)
            rows = torch.stack([keys.transpose(1, 2).reshape(heads, -1), values.reshape(heads, -1)], 1)
        elif self.inside == "tokens":
            rows = rows.transpose(1, 2)
        return rows.reshape(heads, tokens, content)

    def _chunk(self, pool: Tensor, copy: ChunkCopy) -> tuple[Tensor, int, int]:
        """The copy's part of its chunk, `[own layer, rank's head, part, row, element]`, and its rows in the blocks."""
        tile = self.unpack(self.tensors[0][0])
        heads, parts, rows, elements = tile.shape
        row_tokens = self.tensors[0].shape[2] // rows
        layer_count = self.layer_count or len(self.tensors)
        shape = (layer_count, self.kv_head_count, parts, -(-copy.extent_tokens // row_tokens), elements)
        size_bytes = int(np.prod(shape)) * tile.element_size()
        chunk = pool[copy.offset : copy.offset + size_bytes].view(tile.dtype).view(shape)
        first, count = copy.first_token // row_tokens, -(-copy.token_count // row_tokens)
        slot = copy.first_slot // row_tokens
        own = slice(self.first_head, self.first_head + heads)
        layers = slice(self.first_layer, self.first_layer + len(self.tensors))
        return chunk[layers, own, :, first : first + count], slot, slot + count


def checksum(words: NDArray[np.uint8], first_word: int = 0) -> int:
    """The part of a chunk's checksum that is due to these words. The first is word `first_word` of the chunk."""
    word = words.view("<u8")
    position = np.arange(first_word + 1, first_word + 1 + word.size, dtype=np.uint64).astype(np.uint32)
    low = word.astype(np.uint32) + position * np.uint32(0x9E3779B1)
    high = (word >> np.uint64(32)).astype(np.uint32) + position * np.uint32(0x85EBCA77)
    sums = word + low.astype(np.uint64) * high.astype(np.uint64)
    return int(sums.sum(dtype=np.uint64))
