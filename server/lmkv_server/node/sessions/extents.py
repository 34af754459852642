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


def peer_extent(chunk: Chunk, chunk_size: int | None) -> chunk_pb2.Extent:
    """The extent of a held chunk, for a peer; `chunk_size` is None if no engine has attached with the chunk's spec."""
    message = extent(chunk)
    if chunk.parent is not None and (chunk_size is None or chunk.token_count < chunk_size):
        message.parent_key = chunk.parent
    return message


def credit(reserved: Reservation, part: int = 0, *, token_count: int = 0) -> chunk_pb2.Extent:
    """The extent of a write credit for a part of a full chunk, or for a partial chunk of `token_count` tokens."""
    return chunk_pb2.Extent(
        offset=reserved.offset,
        size_bytes=reserved.size_bytes,
        generation=reserved.generation,
        part=part,
        token_count=token_count,
    )
