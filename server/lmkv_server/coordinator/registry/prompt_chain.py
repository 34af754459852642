"""The keys of a prompt under one spec, in slices, so that other tasks run between them. Used by `selection`."""

from __future__ import annotations

import asyncio

from lmkv.keys import KEY_BYTES, ChunkKey, Tokens, page_keys
from lmkv_kernels import chunk_keys

SLICE_KEYS = 2048
SLICE_PAGES = 256
"""The same of an engine's pages: each costs two digests, in Python."""
SLICE_TOKENS = 65_536
"""Work before other tasks run: at most about half a millisecond."""


class PromptChain:
    """The chain of keys of one prompt, which grows by consecutive tokens."""

    def __init__(self, root: ChunkKey, chunk_size: int, page_prior: bytes | None = None) -> None:
        """`page_prior` is the digest before the first page (`page_seed`) if chunks are an engine's pages, else None."""
        self._root = root
        self._parent: bytes = root
        self._chunk_size = chunk_size
        self._prior = page_prior
        chunk_count = min(SLICE_KEYS if page_prior is None else SLICE_PAGES, SLICE_TOKENS // chunk_size)
        self._slice_tokens = max(chunk_count, 1) * chunk_size

    def extend(self, tokens: Tokens) -> bytes:
        """The keys of the next tokens, which begin with a chunk. If chunks are an engine's pages: of full ones only."""
        if self._prior is not None:
            keys, self._prior = page_keys(tokens, self._root, self._chunk_size, self._prior)
            return keys
        keys = chunk_keys(tokens, self._parent, self._chunk_size)
        self._parent = keys[-KEY_BYTES:]
        return keys

    async def extend_in_slices(self, tokens: Tokens) -> bytes:
        """As `extend`; other tasks run after each slice."""
        parts = []
        for start in range(0, tokens.size, self._slice_tokens):
            parts.append(self.extend(tokens[start : start + self._slice_tokens]))
            await asyncio.sleep(0)
        return b"".join(parts)
