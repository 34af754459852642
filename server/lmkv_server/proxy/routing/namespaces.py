"""The specs and LoRA adapters by the names under which engines serve them, as instances register them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec
from lmkv.keys import KEY_BYTES, MAX_KEYS, page_keys, page_seed, root_key
from lmkv.spec import KvSpec
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_kernels import chunk_keys

MAX_NAMESPACES = 16
"""Specs and adapters of one name that a lookup covers, the last registered ones; as at the coordinator."""


@dataclass(frozen=True, slots=True)
class ServedNamespace:
    """The inputs of chunk keys besides tokens and cache salt."""

    spec: KvSpec
    lora_identity: str = ""

    def keys(self, tokens: NDArray[np.uint32], cache_salt: str, secret: bytes) -> bytes:
        """The keys of a prompt's chunks, 16 bytes each; of full ones only, if they have several parts or are pages.

        Of a longer prompt the first `MAX_KEYS`.
        """
        spec = self.spec
        tokens = tokens[: MAX_KEYS * spec.chunk_size]
        if spec.has_page_hashes:
            root = root_key(spec.fingerprint, lora=self.lora_identity, secret=secret)
            return page_keys(tokens, root, spec.chunk_size, page_seed(cache_salt))[0]
        root = root_key(spec.fingerprint, cache_salt=cache_salt, lora=self.lora_identity, secret=secret)
        keys = chunk_keys(tokens, root, spec.chunk_size)
        return keys if spec.has_plain_parts else keys[: tokens.size // spec.chunk_size * KEY_BYTES]


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
