"""Keys and chunks for the node's tests."""

from __future__ import annotations

from hashlib import sha256

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_server.node.cache.host import Chunk, HostTier


def chunk_key(number: int) -> ChunkKey:
    """A key by number."""
    return ChunkKey(number.to_bytes(16, "big"))


def chunk_keys(*numbers: int) -> list[ChunkKey]:
    """Keys by number."""
    return [chunk_key(number) for number in numbers]


def hashed_keys(*numbers: int) -> list[ChunkKey]:
    """Keys by number that differ in their first bytes, as those of prompts do."""
    return [ChunkKey(sha256(str(number).encode()).digest()[:16]) for number in numbers]


def admit(tier: HostTier, spec: KvSpec, number: int) -> Chunk:
    """A full chunk in the tier, its checksum being its number."""
    reserved = tier.reserve(spec.chunk_bytes)
    assert reserved is not None
    chunk = tier.commit(
        reserved.offset,
        key=chunk_key(number),
        fingerprint=spec.fingerprint,
        size_bytes=spec.chunk_bytes,
        checksum=number,
        token_count=spec.chunk_size,
    )
    assert chunk is not None
    return chunk


def clear(tier: HostTier, fingerprint: bytes) -> int:
    """Drops every chunk of one spec that is not pinned, as `TierStack.clear` does; their number."""
    return tier.drop([chunk.key for chunk in tier if chunk.fingerprint == fingerprint and not chunk.pins])
