"""Order-independent digests of sets of chunk keys, by which a node and the coordinator detect lost reports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from lmkv.keys import ChunkKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """A digest of a set of keys; the fields are those of `lmkv.v1.TierDigest`."""

    chunk_count: int = 0
    key_sum: int = 0

    def plus(self, other: Digest) -> Digest:
        """The digest of the union of two disjoint sets."""
        return Digest(
            chunk_count=self.chunk_count + other.chunk_count, key_sum=(self.key_sum + other.key_sum) % (1 << 64)
        )


EMPTY_DIGEST = Digest()


def digest(keys: Collection[ChunkKey]) -> Digest:
    """The digest of distinct keys."""
    if not keys:
        return EMPTY_DIGEST
    heads = np.frombuffer(b"".join(keys), dtype="<u8")[::2]
    return Digest(chunk_count=len(keys), key_sum=int(heads.sum(dtype=np.uint64)))
