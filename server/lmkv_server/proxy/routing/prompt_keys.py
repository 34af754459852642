"""The keys of a prompt's chunks in each namespace that it may be of, computed while the prompt arrives.

A namespace is a spec or LoRA adapter by the name under which engines serve it, as instances register it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec
from lmkv.keys import KEY_BYTES, MAX_KEYS, ChunkKey, page_keys, page_seed, root_key
from lmkv.spec import KvSpec
from lmkv.v1.registry_service_pb2 import Instance
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
        return self._spec.matches_prefixes

    def full(self) -> bytes:
        """The keys of the full chunks so far, 16 bytes each."""
        return bytes(self._keys)

    def all(self) -> bytes:
        """The keys, 16 bytes each: of the full chunks, and of the tokens after them unless chunks have several parts or
        are pages."""
        keys = bytes(self._keys)
        is_partial = self._rest_count > 0 and len(keys) < MAX_KEYS * KEY_BYTES
        if not is_partial or self._spec.has_page_hashes or not self._spec.matches_prefixes:
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


MAX_NAMESPACES = 16
"""Specs and adapters of one name that a lookup covers, the last registered ones; as at the coordinator."""


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """The inputs of chunk keys besides tokens and cache salt."""

    spec: KvSpec
    lora_identity: str = ""

    def growing_keys(self, cache_salt: str, secret: bytes) -> GrowingKeys:
        """The keys of a prompt, of which there are no tokens yet."""
        return GrowingKeys(self.spec, self.lora_identity, cache_salt, secret)


class Namespaces:
    """The namespaces of a fleet."""

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._by_name: dict[str, dict[tuple[bytes, str], ServedNamespace]] = {}
        for instance in instances:
            self._add(instance)

    def of(self, model_name: str) -> list[ServedNamespace]:
        """The possible namespaces of a prompt. Without a name, those of the only spec; empty if there are several."""
        if model_name:
            return list(self._by_name.get(model_name, {}).values())[-MAX_NAMESPACES:]
        specs = {
            one.spec.fingerprint: one
            for kinds in self._by_name.values()
            for one in kinds.values()
            if not one.lora_identity
        }
        return list(specs.values()) if len(specs) == 1 else []

    def _add(self, instance: Instance) -> None:
        specs: dict[bytes, KvSpec] = {}
        for message in instance.specs:
            try:
                specs[message.fingerprint] = spec = KvSpec.from_proto(message)
            except BadKvSpec:  # of a newer version: its chunks are not found
                continue
            self._by_name.setdefault(spec.model_name, {})[spec.fingerprint, ""] = ServedNamespace(spec)
        for served in instance.served_models:
            if served.fingerprint in specs:
                kinds = self._by_name.setdefault(served.name, {})
                kinds[served.fingerprint, served.lora_identity] = ServedNamespace(
                    specs[served.fingerprint], served.lora_identity
                )


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
