"""Chunks in a pool, as a node has them that an engine has filled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv_kernels import checksum
from lmkv_server.node.cache.host import Chunk, HostTier


def commit_chunk(
    pool: Pool, tier: HostTier, spec: KvSpec, key: ChunkKey, content: NDArray[np.uint64] | None = None
) -> int:
    """Commits a chunk, of this content or of what its memory has; returns its offset in the pool."""
    size_bytes = spec.chunk_bytes
    reserved = tier.reserve(size_bytes)
    assert reserved is not None
    if content is not None:
        np.frombuffer(pool.buffer, np.uint64, size_bytes // 8, reserved.offset)[:] = content
    tier.commit(
        Chunk(
            offset=reserved.offset,
            key=key,
            fingerprint=spec.fingerprint,
            size_bytes=size_bytes,
            checksum=checksum(pool.buffer, reserved.offset, size_bytes),
            token_count=spec.chunk_size,
        )
    )
    return reserved.offset
