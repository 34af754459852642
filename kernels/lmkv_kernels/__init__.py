"""Moves KV-cache blocks between an engine's pages and chunks in the pool, and sums chunks. CPU; used by the connector
and the node.

`reference` is the plain numpy twin of every kernel: it defines what they must do, bit for bit.
"""

from lmkv_kernels.host import checksum, gather, scatter
from lmkv_kernels.pages import BlockCopy, Pages, pages_from_tensors

__all__ = ["BlockCopy", "Pages", "checksum", "gather", "pages_from_tensors", "scatter"]
