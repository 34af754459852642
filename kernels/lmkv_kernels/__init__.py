"""What must be compiled. CPU.

Moves KV-cache blocks between an engine's pages and chunks in the pool, and sums chunks, for the connector and the node;
`reference` is the plain numpy twin of every such kernel: it defines what they must do, bit for bit. `ChunkTable` keeps
the coordinator's layout map; `token_ids` reads what it is asked for.
"""

from lmkv_kernels._chunk_table import ChunkTable
from lmkv_kernels.host import checksum, gather, scatter, token_ids
from lmkv_kernels.pages import BlockCopy, Pages, pages_from_tensors

__all__ = ["BlockCopy", "ChunkTable", "Pages", "checksum", "gather", "pages_from_tensors", "scatter", "token_ids"]
