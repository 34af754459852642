"""The keys of a prompt in each namespace that it may be of, computed while the prompt arrives. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv_server.proxy.routing.namespaces import ServedNamespace


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptKeys:
    """The keys of a prompt's chunks in one namespace, 16 bytes each."""

    keys: bytes
    fingerprint: bytes
    chunk_size: int


class GrowingChains:
    """The keys of the tokens that `add` has taken."""

    def __init__(self, namespaces: Sequence[ServedNamespace], cache_salt: str, secret: bytes) -> None:
        self._namespaces = namespaces
        self._cache_salt = cache_salt
        self._growing = [one.growing_keys(cache_salt, secret) for one in namespaces]
        self._token_count = 0

    @property
    def has_prefix_matches(self) -> bool:
        """Whether in each namespace, of one or more, an instance holds a number of leading chunks, whatever follows."""
        return bool(self._growing) and all(one.has_prefix_matches for one in self._growing)

    def add(self, tokens: NDArray[np.uint32]) -> None:
        """Takes the next tokens of the prompt."""
        self._token_count += tokens.size
        for one in self._growing:
            one.add(tokens)

    def is_of(self, namespaces: Sequence[ServedNamespace], cache_salt: str, token_count: int) -> bool:
        """Whether these are the keys of a prompt that is known by now: all its tokens, and no more, were taken."""
        found = (self._token_count, self._cache_salt, self._namespaces)
        return found == (token_count, cache_salt, namespaces)

    def full(self) -> list[PromptKeys]:
        """The keys of the full chunks so far in each namespace."""
        return self._named([one.full() for one in self._growing])

    def all(self) -> list[PromptKeys]:
        """The keys in each namespace."""
        return self._named([one.all() for one in self._growing])

    def _named(self, keys: Sequence[bytes]) -> list[PromptKeys]:
        return [
            PromptKeys(keys=of_one, fingerprint=one.spec.fingerprint, chunk_size=one.spec.chunk_size)
            for one, of_one in zip(self._namespaces, keys, strict=True)
        ]
