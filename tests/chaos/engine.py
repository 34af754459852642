"""One engine at its node, and what is right in a pool: every chunk's bytes follow from its key."""

from __future__ import annotations

import numpy as np

from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.v1.chunk_pb2 import Extent
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_kernels import checksum
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

SPEC = small_spec(head_size=256)
"""Its chunks have 256 KiB."""
PROMPT_CHUNKS = 16
PROMPTS = [
    [ChunkKey(prompt.to_bytes(8, "big") + index.to_bytes(8, "big")) for index in range(PROMPT_CHUNKS)]
    for prompt in range(1, 37)
]


class WrongBytes(Exception):
    """A chunk's bytes are not those that its key stands for: what must never happen."""


def words_of(key: ChunkKey) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """What the chunk of this key holds, wherever it is."""
    words = np.arange(SPEC.chunk_bytes // 8, dtype=np.uint64)
    return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "big") % (1 << 61))


class Engine:
    """One engine at its node: the line, and the pool as a worker has it."""

    def __init__(self, client: EngineClient, pool: Pool) -> None:
        self.client = client
        self._pool = pool

    def write(self, key: ChunkKey, extent: Extent) -> int:
        """Writes a chunk into a write credit; its checksum."""
        self._words(extent)[:] = words_of(key)
        return checksum(self._pool.buffer, extent.offset, SPEC.chunk_bytes)

    def check(self, key: ChunkKey, chunk: HeldChunk) -> None:
        """Raises `WrongBytes` unless its extent holds the chunk."""
        if not np.array_equal(self._words(chunk.extent), words_of(key)):
            raise WrongBytes(f"{key.hex()} at {chunk.extent.offset} of {self.client.engine_id}")

    def close(self) -> None:
        """The line has ended."""

    def _words(self, extent: Extent) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.frombuffer(self._pool.buffer, np.uint64, SPEC.chunk_bytes // 8, extent.offset)
