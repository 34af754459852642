"""Copies of a request's tokens between the blocks that hold them and an extent. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lmkv_kernels import ChunkCopy


def blocks_of(block_ids: Sequence[int], block_size: int, low: int, high: int) -> list[int]:
    """The blocks that hold tokens `[low, high)` of the prompt whose blocks these are."""
    return list(block_ids[low // block_size : -(-high // block_size)])


def prompt_copy(
    block_ids: Sequence[int], block_size: int, *, chunk_start: int, low: int, high: int, offset: int, extent_tokens: int
) -> ChunkCopy:
    """Tokens `[low, high)` of a prompt, in the chunk that begins at `chunk_start` and has its extent at `offset`."""
    return ChunkCopy(
        offset=offset,
        extent_tokens=extent_tokens,
        token_count=high - low,
        first_token=low - chunk_start,
        first_slot=low % block_size,
        block_ids=blocks_of(block_ids, block_size, low, high),
    )
