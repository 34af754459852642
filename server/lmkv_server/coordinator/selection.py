"""Which chunks a request names, by tokens or by keys: the same for all requests of `CacheService`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadSelection, BadTokens, ModelNotFound
from lmkv.keys import KEY_BYTES, MAX_KEYS, Tokens, as_tokens, check_keys, root_key
from lmkv_kernels import chunk_keys
from lmkv_server.coordinator.models import Models, Namespace


class NamesChunks(Protocol):
    """The fields by which requests name chunks."""

    @property
    def tokens(self) -> Iterable[int]: ...
    @property
    def model_name(self) -> str: ...
    @property
    def chunk_keys(self) -> bytes: ...
    @property
    def cache_salt(self) -> str: ...
    @property
    def lora_name(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Chunks in prompt order."""

    keys: bytes
    """16 bytes each."""
    fingerprint: bytes = b""
    """Of their spec; empty where the keys alone were given."""

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES


class Selector:
    """Turns what requests name into keys, under the names, specs and LoRA adapters that are registered."""

    def __init__(self, models: Models, cluster_secret: bytes = b"") -> None:
        self._models = models
        self._secret = cluster_secret

    def select(self, request: NamesChunks) -> list[Selection]:
        """What a request names: nothing, the keys it gives, or the keys of its tokens under each spec of its model.

        Tokens name nothing while no engine has registered.

        Raises `BadTokens`, `BadChunkKey`, `ModelNotFound`, `ModelAmbiguous`.
        """
        if not request.chunk_keys:
            tokens = np.array(request.tokens, dtype=np.int32)
            return self.of_tokens(tokens, request.model_name, request.cache_salt, request.lora_name)
        if request.tokens:
            raise BadTokens("chunks are named by tokens and by chunk_keys; use one of the two")
        if request.model_name:
            self._models.namespaces(request.model_name)
        return [Selection(keys=check_keys(request.chunk_keys))]

    def required(self, request: NamesChunks) -> list[Selection]:
        """As `select`, for requests that need chunks: never empty.

        Raises `BadSelection`, or `ModelNotFound` if no engine has registered, too.
        """
        selections = self.select(request)
        if not selections and any(True for _ in request.tokens):
            raise ModelNotFound("no engine has registered yet, so that nothing is stored", known_models="")
        if not selections:
            raise BadSelection("no chunk is named; set tokens or chunk_keys")
        return selections

    def of_tokens(
        self, tokens: NDArray[np.integer], model_name: str = "", cache_salt: str = "", lora_name: str = ""
    ) -> list[Selection]:
        """The keys of a prompt under each spec that it can be meant under; none without tokens. Raises as `select`."""
        if not tokens.size:
            return []
        unsigned = as_tokens(tokens)
        return [
            Selection(keys=self._keys(unsigned, namespace, cache_salt), fingerprint=namespace.spec.fingerprint)
            for namespace in self._models.namespaces(model_name, lora_name)
        ]

    def _keys(self, tokens: Tokens, namespace: Namespace, cache_salt: str) -> bytes:
        spec = namespace.spec
        if tokens.size > MAX_KEYS * spec.chunk_size:
            raise BadTokens(f"{tokens.size} tokens make more than {MAX_KEYS} chunks", limit=MAX_KEYS)
        root = root_key(spec.fingerprint, cache_salt=cache_salt, lora=namespace.lora_identity, secret=self._secret)
        return chunk_keys(as_tokens(tokens, spec.vocab_size), root, spec.chunk_size)
