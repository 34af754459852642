"""Keys and chunks for the node's tests."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(16, "big"))


def chunk_keys(*numbers: int) -> list[ChunkKey]:
    return [chunk_key(number) for number in numbers]


def hashed_keys(*numbers: int) -> list[ChunkKey]:
    """Keys by number that differ in their first bytes, as those of prompts do."""
    return [ChunkKey(sha256(str(number).encode()).digest()[:16]) for number in numbers]


def put(
    tier: HostTier,
    key: ChunkKey,
    size_bytes: int,
    *,
    fingerprint: bytes = bytes(16),
    token_count: int = 1,
    pool: Pool | None = None,
    content: bytes = b"",
    reason: MissReason = MissReason.EVICTED_BY_STORE,
    **others: Any,
) -> Chunk:
    """Commits a chunk, for which others may be evicted for this reason.

    With a `pool` its bytes are `content`, and its checksum is theirs.
    """
    reserved = tier.reserve(size_bytes, evict=reason)
    assert reserved
    if pool:
        pool.buffer[reserved.offset : reserved.offset + size_bytes] = content
        others["checksum"] = checksum(pool.buffer, reserved.offset, size_bytes)
    placed = {"offset": reserved.offset, "size_bytes": size_bytes, "checksum": 0, **others}
    chunk = tier.commit(Chunk(key=key, fingerprint=fingerprint, token_count=token_count, **placed))
    assert chunk, "it is held already"
    return chunk


def admit(tier: HostTier, spec: KvSpec, number: int) -> Chunk:
    """A full chunk in the tier, its checksum being its number."""
    key, tokens = chunk_key(number), spec.chunk_size
    return put(tier, key, spec.chunk_bytes, fingerprint=spec.fingerprint, token_count=tokens, checksum=number)


def clear(tier: HostTier, fingerprint: bytes) -> int:
    """Drops every chunk of one spec that is not pinned, as `TierStack.clear` does; their number."""
    return tier.drop([chunk.key for chunk in tier if chunk.fingerprint == fingerprint and not chunk.pins])
