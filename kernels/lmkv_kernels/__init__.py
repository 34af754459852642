"""Compiled code for CPUs: copies between KV pages and chunks, checksums, chunk keys, and the chunk table.

`gather` and `scatter` copy KV between an engine's pages and chunks in the pool; `reference` is their specification in
plain torch, bit for bit. `ChunkTable` is the data structure of the coordinator's layout map. `cuda` copies on GPUs.
Start with `pages.Pages` and `host.gather`.
"""

from lmkv_kernels._chunk_table import ChunkTable
from lmkv_kernels._host import JsonScan
from lmkv_kernels.copies import ChunkCopy, copied_bytes
from lmkv_kernels.host import checksum, chunk_keys, gather, scatter, summed_copy, token_ids
from lmkv_kernels.pages import Pages, packed_rows, separate_rows, token_rows, whole_states, whole_tiles

__all__ = [
    "ChunkCopy",
    "ChunkTable",
    "JsonScan",
    "Pages",
    "checksum",
    "chunk_keys",
    "copied_bytes",
    "gather",
    "packed_rows",
    "scatter",
    "separate_rows",
    "summed_copy",
    "token_ids",
    "token_rows",
    "whole_states",
    "whole_tiles",
]
