"""What must be compiled. CPU.

Moves KV between an engine's pages and chunks in the pool, and sums chunks, for the connector and the node; `reference`
is the plain torch twin of every such kernel: it defines what they must do, bit for bit. `ChunkTable` keeps the
coordinator's layout map; `token_ids` reads what it is asked for, and `chunk_keys` makes the keys of that.
"""

from lmkv_kernels._chunk_table import ChunkTable
from lmkv_kernels.copies import ChunkCopy, copied_bytes
from lmkv_kernels.host import checksum, chunk_keys, gather, scatter, summed_copy, token_ids
from lmkv_kernels.pages import Pages, packed_rows, token_rows, whole_tiles

__all__ = [
    "ChunkCopy",
    "ChunkTable",
    "Pages",
    "checksum",
    "chunk_keys",
    "copied_bytes",
    "gather",
    "packed_rows",
    "scatter",
    "summed_copy",
    "token_ids",
    "token_rows",
    "whole_tiles",
]
