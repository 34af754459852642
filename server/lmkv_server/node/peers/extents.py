"""Checks where a peer says that chunks are in its memory, before anything is read from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmkv.errors import BadMessage
from lmkv.keys import KEY_BYTES, ChunkKey, check_prefix_digests
from lmkv.spec import KvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerChunk:
    """A chunk in a peer's memory that this node may read."""

    index: int
    """Index of its key among those of the prompt, or of the order."""
    address: int
    """Address in the peer's memory."""
    checksum: int
    token_count: int
    size_bytes: int
    parent: ChunkKey | None = None
    """Of a chunk in which prompts end: the key of the chunk before it, or the root of its key chain, if the peer knows
    it."""
    prefix_digests: bytes = b""
    """With `parent`: `lmkv.keys.prefix_digests`, if the peer knows them."""


def peer_chunk(
    index: int,
    granted: chunk_pb2.GrantedChunk,
    token_count: int,
    spec: KvSpec,
    regions: Sequence[pb.Region],
    size_bytes: int | None = None,
) -> PeerChunk:
    """The chunk of `token_count` tokens, or one part of it, as a peer offers it; `size_bytes` is its size, if known.

    Raises `BadMessage` if the extent is outside the peer's regions, or does not have the size of such a chunk,
    `BadChunkKey` if its prefix digests are malformed.
    """
    extent = granted.extent
    if not (
        0 <= extent.region < len(regions)
        and granted.token_count == token_count
        and spec.fits(extent.size_bytes, token_count)
        and size_bytes in (None, extent.size_bytes)
        and 0 <= extent.offset <= regions[extent.region].size_bytes - extent.size_bytes
    ):
        raise BadMessage(f"a peer offers an invalid extent: {extent}", field="extent")
    digests = check_prefix_digests(granted.prefix_digests, token_count)
    has_parent = (token_count < spec.chunk_size or digests) and len(granted.parent_key) == KEY_BYTES
    return PeerChunk(
        index=index,
        address=regions[extent.region].address + extent.offset,
        checksum=granted.checksum,
        token_count=token_count,
        size_bytes=extent.size_bytes,
        parent=ChunkKey(granted.parent_key) if has_parent else None,
        prefix_digests=digests if has_parent and spec.ends_anywhere else b"",
    )


def granted_chunks(
    response: pb.AcquireResponse,
    indices: Sequence[int],
    spec: KvSpec,
    regions: Sequence[pb.Region],
    size_bytes: Callable[[int], int | None] = lambda _: None,
) -> list[PeerChunk]:
    """The chunks that a peer grants, of those whose keys were sent; `indices` are the indices of these.

    `size_bytes` returns the size of a chunk by its index, if that is known.

    Raises `BadMessage` if the grant does not match the keys, or an extent is invalid.
    """
    chunks, present = response.grant.chunks, list(response.present)
    is_ordered = present == sorted(set(present)) and all(0 <= at < len(indices) for at in present)
    if len(chunks) != len(present) or not is_ordered:
        raise BadMessage("a peer's grant does not match the keys that were sent", field="present")
    return [
        peer_chunk(indices[at], granted, granted.token_count, spec, regions, size_bytes(indices[at]))
        for at, granted in zip(present, chunks, strict=True)
    ]
