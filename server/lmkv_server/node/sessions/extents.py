"""Chunks and write credits of the pool as messages name them: extents."""

from __future__ import annotations

from collections.abc import Iterable

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


MAX_DIGEST_BYTES = rpc.MAX_MESSAGE_BYTES // 4
"""Most prefix digests in one message, in bytes; other chunks then have none there."""


def peer_extents(chunks: Iterable[Chunk], chunk_size: int | None) -> list[chunk_pb2.Extent]:
    """The extents of held chunks, for a peer; `chunk_size` is None if no engine has attached with the chunks' spec."""
    messages, room = [], MAX_DIGEST_BYTES
    for chunk in chunks:
        message = extent(chunk)
        if chunk.parent is not None and (chunk.prefix_digests or chunk_size is None or chunk.token_count < chunk_size):
            message.parent_key = chunk.parent
        room -= len(chunk.prefix_digests)
        if room >= 0:
            message.prefix_digests = chunk.prefix_digests
        messages.append(message)
    return messages


def credit(reserved: Reservation, part: int = 0, *, token_count: int = 0) -> chunk_pb2.Extent:
    """The extent of a write credit for a part of a full chunk, or for a partial chunk of `token_count` tokens."""
    return chunk_pb2.Extent(
        offset=reserved.offset,
        size_bytes=reserved.size_bytes,
        generation=reserved.generation,
        part=part,
        token_count=token_count,
    )
