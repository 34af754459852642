"""The keys of a prompt's chunks, computed while the prompt arrives. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import KEY_BYTES, MAX_KEYS, ChunkKey, page_keys, page_seed, root_key
from lmkv.spec import KvSpec
from lmkv_kernels import chunk_keys


class GrowingKeys:
    """The keys of one prompt for one spec and adapter; of a longer prompt the first `MAX_KEYS`."""

    def __init__(self, spec: KvSpec, lora_identity: str, cache_salt: str, secret: bytes) -> None:
        self._spec = spec
        salt = "" if spec.has_page_hashes else cache_salt  # which a page's digest has
        self._root = root_key(spec.fingerprint, cache_salt=salt, lora=lora_identity, secret=secret)
        self._before: bytes = page_seed(cache_salt) if spec.has_page_hashes else self._root
        """What the next full chunk follows: a key, or the digest of a page."""
        self._keys = bytearray()
        self._rest: list[NDArray[np.uint32]] = []
        self._rest_count = 0

    def add(self, tokens: NDArray[np.uint32]) -> None:
        """Takes the next tokens. A copy of some of them remains until their chunk is full."""
        room = MAX_KEYS - len(self._keys) // KEY_BYTES
        if not room:
            return
        self._rest.append(tokens)
        self._rest_count += tokens.size
        size = self._spec.chunk_size
        if self._rest_count < size:
            return
        waiting = self._waiting()
        full = min(waiting.size // size, room) * size
        self._keys += self._hash(waiting[:full])
        self._rest = [waiting[full:].copy()]  # a view would keep all of them
        self._rest_count = waiting.size - full

    @property
    def has_prefix_matches(self) -> bool:
        """Whether an instance holds a number of leading chunks, one by one, whatever follows them."""
        return self._spec.has_plain_parts

    def full(self) -> bytes:
        """The keys of the full chunks so far, 16 bytes each."""
        return bytes(self._keys)

    def all(self) -> bytes:
        """The keys, 16 bytes each: of the full chunks, and of the tokens after them unless chunks have several parts or
        are pages."""
        keys = bytes(self._keys)
        is_partial = self._rest_count > 0 and len(keys) < MAX_KEYS * KEY_BYTES
        if not is_partial or self._spec.has_page_hashes or not self._spec.has_plain_parts:
            return keys
        return keys + chunk_keys(self._waiting(), self._before, self._spec.chunk_size)

    def _waiting(self) -> NDArray[np.uint32]:
        return self._rest[0] if len(self._rest) == 1 else np.concatenate(self._rest)

    def _hash(self, tokens: NDArray[np.uint32]) -> bytes:
        if self._spec.has_page_hashes:
            keys, self._before = page_keys(tokens, self._root, self._spec.chunk_size, self._before)
        else:
            keys = chunk_keys(tokens, self._before, self._spec.chunk_size)
            self._before = ChunkKey(keys[-KEY_BYTES:])
        return keys
