"""The keys of one engine's chunks: of tokens, or of pages that the engine names by digests. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadChunkKey
from lmkv.keys import (
    FOREIGN_DIGEST_BYTES,
    ChunkKey,
    KeyChain,
    PageKeyChain,
    as_tokens,
    foreign_key,
    page_keys,
    page_seed,
    root_key,
    split_keys,
)
from lmkv.spec import KvSpec
from lmkv_kernels import chunk_keys


class KeySpace:
    """Computes keys for one spec. The cluster's secret is part of them: other clients cannot probe for prompts."""

    def __init__(self, spec: KvSpec, secret: str = "") -> None:
        self._spec = spec
        self._secret = secret.encode()

    def root(self, salt: str, lora: str) -> ChunkKey:
        """The root of the keys of a tenant's salt and the identity of a LoRA adapter, both possibly empty."""
        return root_key(self._spec.fingerprint, cache_salt=salt, lora=lora, secret=self._secret)

    def chain(self, *, salt: str, lora: str, extras: Mapping[int, bytes]) -> KeyChain:
        """The chain of a prompt that grows. `extras`: inputs of its chunks' KV other than tokens, by index."""
        if self._spec.has_page_hashes:
            return PageKeyChain(self.root("", lora), self._spec.chunk_size, extras, seed=page_seed(salt))
        return KeyChain(self.root(salt, lora), self._spec.chunk_size, extras)

    def of_tokens(
        self, tokens: Sequence[int] | NDArray[np.integer], *, salt: str, lora: str, partial: bool
    ) -> list[ChunkKey]:
        """Keys of the full chunks and, if `partial`, of the tokens after them. Raises `BadTokens`."""
        array = as_tokens(tokens, self._spec.vocab_size)
        if self._spec.has_page_hashes:
            packed, _ = page_keys(array, self.root("", lora), self._spec.chunk_size, page_seed(salt))
            return split_keys(packed, limit=max(1, array.size))
        if not partial:
            array = array[: array.size - array.size % self._spec.chunk_size]
        return split_keys(chunk_keys(array, self.root(salt, lora), self._spec.chunk_size), limit=max(1, array.size))

    def of_digests(self, digests: Sequence[bytes | str], *, salt: str) -> list[ChunkKey]:
        """One key for each digest. Raises `BadChunkKey` if one is neither 32 bytes nor 64 hexadecimal digits."""
        root = self.root(salt, "")
        return [foreign_key(root, _digest(one, index)) for index, one in enumerate(digests)]


def _digest(digest: bytes | str, index: int) -> bytes:
    try:
        raw = bytes.fromhex(digest) if isinstance(digest, str) else digest
    except ValueError:
        raw = b""
    if len(raw) != FOREIGN_DIGEST_BYTES:
        raise BadChunkKey(
            f"digests[{index}] is neither {FOREIGN_DIGEST_BYTES} bytes nor as many in hexadecimal digits",
            field="digests",
        )
    return raw
