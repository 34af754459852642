"""The keys of one engine's chunks, of tokens or of pages named by digests, and the names of its model and adapters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadChunkKey, BadKvSpec
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
from lmkv.spec import MAX_SERVED_MODELS, KvSpec, ServedModel
from lmkv.v1 import chunk_pb2
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


class ServedNames:
    """Changed by the scheduler's thread; `messages` may be read by any.

    At most `MAX_SERVED_MODELS`: beyond that, the adapter that was not used for longest gives way.
    """

    def __init__(self, model_names: Iterable[str] = ()) -> None:
        """`model_names` are the names of the model itself; those that cannot be registered are left out."""
        models = [model for name in model_names if (model := _served(name, "")) is not None]
        self._models = models[: MAX_SERVED_MODELS // 2]
        self._adapters: OrderedDict[str, tuple[str, ServedModel | None]] = OrderedDict()
        """The identity of each name, None if it cannot be registered; the name that was used last is at the end."""
        self.messages: tuple[chunk_pb2.ServedModel, ...] = ()
        """All names, as they are announced; the list is replaced as a whole."""
        self._publish()

    def use(self, name: str, lora_identity: str) -> chunk_pb2.ServedModel | None:
        """A request uses a LoRA adapter: what is to be announced, None if it was before."""
        known = self._adapters.get(name)
        if known is not None and known[0] == lora_identity:
            self._adapters.move_to_end(name)
            return None
        model = _served(name, lora_identity)
        self._adapters[name] = (lora_identity, model)
        self._adapters.move_to_end(name)
        while len(self._models) + len(self._adapters) > MAX_SERVED_MODELS:
            self._adapters.popitem(last=False)
        self._publish()
        return model.to_proto() if model else None

    @property
    def has_adapters(self) -> bool:
        """Whether any adapter was used."""
        return bool(self._adapters)

    def _publish(self) -> None:
        adapters = (model for _, model in self._adapters.values() if model is not None)
        self.messages = tuple(model.to_proto() for model in (*self._models, *adapters))


def _served(name: str, lora_identity: str) -> ServedModel | None:
    try:
        return ServedModel(name=name, fingerprint=b"", lora_identity=lora_identity)
    except BadKvSpec:  # too long, or not printable: the engine serves it, lookups by this name do not find it
        return None
