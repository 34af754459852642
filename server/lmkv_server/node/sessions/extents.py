"""Chunks and write credits of the pool as messages name them: extents."""

from __future__ import annotations

from lmkv import rpc
from lmkv.v1 import chunk_pb2
from lmkv_server.node.cache.host import Chunk, Reservation

MAX_EXTENT_BYTES = 56
"""Largest size of an extent in a message."""
MAX_EXTENTS = rpc.MAX_MESSAGE_BYTES * 3 // 4 // MAX_EXTENT_BYTES
"""Largest number of extents in one message."""


def extent(chunk: Chunk) -> chunk_pb2.Extent:
    """The extent of a held chunk."""
    return chunk_pb2.Extent(
        region=chunk.tier.region,
        offset=chunk.offset,
        size_bytes=chunk.size_bytes,
        checksum=chunk.checksum,
        generation=chunk.generation,
        token_count=chunk.token_count,
    )


def credit(reserved: Reservation, part: int = 0) -> chunk_pb2.Extent:
    """The extent of a write credit for a part of a chunk."""
    return chunk_pb2.Extent(
        offset=reserved.offset, size_bytes=reserved.size_bytes, generation=reserved.generation, part=part
    )
