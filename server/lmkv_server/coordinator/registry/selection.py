"""The chunks that a request of `CacheService` names, by tokens or by keys.

Long key chains are computed in slices, one chain at a time, so that the event loop serves other calls between slices
and a cancelled call stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadChunkKey, BadSelection, BadTokens, Full, ModelNotFound
from lmkv.keys import (
    KEY_BYTES,
    MAX_KEYS,
    ChunkKey,
    Tokens,
    as_tokens,
    check_keys,
    join_keys,
    page_keys,
    page_seed,
    part_key,
    root_key,
    split_keys,
)
from lmkv.prompt import Prompt, match
from lmkv.rpc.messages import names_chunks
from lmkv.spec import KvSpec
from lmkv.v1.prompt_pb2 import PromptSelector
from lmkv_kernels import chunk_keys
from lmkv_server.coordinator.core.layout_map import LayoutMap
from lmkv_server.coordinator.core.match import HeldAt, keys_of_whole
from lmkv_server.coordinator.core.models import MAX_SHOWN, Models, Namespace

SLICE_KEYS = 2048
SLICE_PAGES = 256
"""The same of an engine's pages: each costs two digests, in Python."""
SLICE_TOKENS = 65_536
"""Work before other tasks run: at most about half a millisecond."""
MAX_SELECTED_KEYS = 2 * MAX_KEYS
"""Keys that one request may need: all parts of its chunks, by tokens under all specs of its model. 2 MiB."""
MAX_NAMESPACES = 16
"""Maximum number of specs and adapters of one name that a lookup covers: those registered last."""
SHORT_KEYS = 4096
"""Requests with at most this many keys are computed without a pause: about a millisecond."""
READ_AT_ONCE = 32_768
"""Token ids of a message that are read before other tasks run: a millisecond or two."""
JOINED_AT_ONCE = 16_384
"""Keys of a message that are joined before other tasks run: a millisecond or two."""
MAX_WAITING = 64
"""Long requests of one tenant that wait; each is at most a message in size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedChunks:
    """The chunks of a prompt under one spec, or chunks whose spec is not known."""

    keys: bytes
    """16 bytes each, in prompt order."""
    fingerprint: bytes = b""
    """Fingerprint of their spec; empty if the request gave keys, and their spec is not known."""
    prompt: Prompt | None = None
    """The prompt that has them; None if their spec is not known. It has tokens if the request gave these, and hits may
    end inside chunks."""

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def parted(self) -> Prompt | None:
        """The prompt, if a hit of it has other items than its first chunks."""
        return self.prompt if self.prompt and not self.prompt.spec.matches_prefixes else None

    def held_at(self, layout: LayoutMap, instance_id: str, tier: int) -> SelectedChunks:
        """These chunks as an instance holds them in one tier (0: in any): without a chunk of exactly the prompt's last
        tokens, it may have one that begins with them."""
        if self.prompt is None or not self.keys:
            return self
        own = self.keys[-KEY_BYTES:]
        for key in keys_of_whole(layout, self.prompt) if not layout.match_at(instance_id, tier, own)[0] else ():
            if layout.match_at(instance_id, tier, key)[0]:
                return replace(self, keys=self.keys[:-KEY_BYTES] + key, prompt=self.prompt.ending_with(key))
        return self

    def columns(self, layout: LayoutMap) -> list[bytes]:
        """The keys of each part, and those of other chunks that begin with the prompt's last tokens."""
        if self.prompt is None:
            return [self.keys]
        others = list(keys_of_whole(layout, self.prompt))
        return [
            self.prompt.packed_keys(part, 0, len(self)) + join_keys(part_key(key, part) for key in others)
            for part in range(len(self.prompt.spec.parts))
        ]

    def match_at(self, layout: LayoutMap, instance_id: str, tier: int) -> int:
        """Chunks of the longest hit that an instance holds in one tier."""
        if self.prompt is None:
            return layout.match_at(instance_id, tier, self.keys)[0]
        return match(self.prompt, HeldAt(layout, self.prompt, (instance_id, tier))).chunk_count


class PromptChain:
    """The chain of keys of one prompt, which grows by consecutive tokens."""

    def __init__(self, root: ChunkKey, chunk_size: int, page_prior: bytes | None = None) -> None:
        """`page_prior` is the digest before the first page (`page_seed`) if chunks are an engine's pages, else None."""
        self.root = root
        self._parent: bytes = root
        self._chunk_size = chunk_size
        self._prior = page_prior
        chunk_count = min(SLICE_KEYS if page_prior is None else SLICE_PAGES, SLICE_TOKENS // chunk_size)
        self._slice_tokens = max(chunk_count, 1) * chunk_size

    def extend(self, tokens: Tokens) -> bytes:
        """The keys of the next tokens, which begin with a chunk. If chunks are an engine's pages: of full ones only."""
        if self._prior is not None:
            keys, self._prior = page_keys(tokens, self.root, self._chunk_size, self._prior)
            return keys
        keys = chunk_keys(tokens, self._parent, self._chunk_size)
        self._parent = keys[-KEY_BYTES:]
        return keys

    async def extend_in_slices(self, tokens: Tokens) -> bytes:
        """Extends the chain as `extend` does; other tasks run after each slice."""
        parts = []
        for start in range(0, tokens.size, self._slice_tokens):
            parts.append(self.extend(tokens[start : start + self._slice_tokens]))
            await asyncio.sleep(0)
        return b"".join(parts)


class Selector:
    """Computes the keys of the chunks that requests name, under the registered models and LoRA adapters.

    Lookups skip specs without chunks in the layout map.
    """

    def __init__(self, models: Models, layout: LayoutMap, cluster_secret: bytes = b"") -> None:
        self._models = models
        self._layout = layout
        self._secret = cluster_secret
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._waiting_count = 0
        self._keys_since_pause = 0
        """Keys that short requests computed since other tasks last ran."""

    async def select(self, prompt: PromptSelector, *, held_only: bool = False) -> list[SelectedChunks]:
        """The keys of a prompt, or those of its tokens under each spec of its model; empty if it names nothing.

        Also empty for tokens while no engine has registered, and for keys with a fingerprint that no instance has
        registered. `held_only` omits specs without chunks in the layout map.

        Raises `BadTokens`, `BadChunkKey`, `ModelNotFound`, `ModelAmbiguous`, `Full`.
        """
        if prompt.keys.chunk_keys:
            return self.of_keys(await self._joined(prompt.keys.chunk_keys), prompt.keys.fingerprint)
        named = prompt.tokens
        tokens = await self._array(named.token_ids)
        return await self.of_tokens(tokens, named.model_name, named.cache_salt, named.lora_name, held_only=held_only)

    def of_keys(self, keys: bytes, fingerprint: bytes = b"") -> list[SelectedChunks]:
        """Chunks by their keys, 16 bytes each; `fingerprint` is that of their spec, if the request gives it.

        Empty without keys, and if no instance has registered the fingerprint. Raises `BadChunkKey`.
        """
        check_keys(keys)
        if not keys or (fingerprint and self._models.find_spec(fingerprint) is None):
            return []
        return [self._of_keys(keys, fingerprint)]

    def find_spec(self, fingerprint: bytes) -> KvSpec | None:
        """The registered spec of a fingerprint."""
        return self._models.find_spec(fingerprint) if fingerprint else None

    async def _joined(self, keys: Sequence[bytes]) -> bytes:
        """The keys of a message as one string; long lists are read in slices, one at a time. Raises `BadChunkKey`."""
        if len(keys) > MAX_KEYS:
            raise BadChunkKey(
                f"chunk_keys has {len(keys)} keys; at most {MAX_KEYS} are allowed", field="chunk_keys", limit=MAX_KEYS
            )
        if len(keys) <= JOINED_AT_ONCE:
            return _join(keys)
        parts = []
        async with self._reading:
            for start in range(0, len(keys), JOINED_AT_ONCE):
                parts.append(_join(keys[start : start + JOINED_AT_ONCE]))
                await asyncio.sleep(0)
        return b"".join(parts)

    async def _array(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Token ids of a request. Long lists are read in slices, one list at a time, unless protobuf copies them."""
        if len(tokens) <= READ_AT_ONCE or hasattr(tokens, "__array__"):
            return np.array(tokens, dtype=np.int32)
        array = np.empty(len(tokens), dtype=np.int32)
        async with self._reading:
            for start in range(0, len(tokens), READ_AT_ONCE):
                array[start : start + READ_AT_ONCE] = tokens[start : start + READ_AT_ONCE]
                await asyncio.sleep(0)
        return array

    async def required(self, prompt: PromptSelector) -> list[SelectedChunks]:
        """As `select`, but never empty, and with the parts of chunks.

        Keys without a fingerprint have the spec under which the first held one was reported.

        Also raises `BadSelection`, or `ModelNotFound` if no engine has registered, or none with the fingerprint.
        """
        if not names_chunks(prompt):
            raise BadSelection("no chunk is named; set prompt.tokens.token_ids or prompt.keys.chunk_keys")
        selections = await self.select(prompt)
        if not selections and prompt.keys.fingerprint:
            raise ModelNotFound(
                f"no engine has registered a spec with fingerprint {prompt.keys.fingerprint[:MAX_SHOWN].hex()}",
                known_models="",
            )
        if not selections:
            raise ModelNotFound("no engine has registered yet, so nothing is stored", known_models="")
        if prompt.keys.chunk_keys and not prompt.keys.fingerprint:
            (named,) = selections
            selections = [self._of_keys(named.keys, await self._held_fingerprint(named.keys))]
        for one in selections:
            if one.prompt:
                await self.prepare(one.prompt)
        return selections

    async def prepare(self, prompt: Prompt, chunk_count: int | None = None) -> None:
        """Computes the keys of all parts of a prompt's first chunks. Other tasks run after each slice of a long one."""
        count = len(prompt) if chunk_count is None else chunk_count
        for part in range(1, len(prompt.spec.parts)):
            for start in range(0, count, SLICE_KEYS):
                stop = min(start + SLICE_KEYS, count)
                prompt.packed_keys(part, start, stop)
                await self._pause_if_due(stop - start)

    async def keys_by_part(self, keys: bytes, part_count: int) -> list[bytes]:
        """The keys of each part of chunks whose spec is not known. Other tasks run after each slice of many."""
        columns = [keys]
        for part in range(1, part_count):
            column = []
            for start in range(0, len(keys), SLICE_KEYS * KEY_BYTES):
                named = split_keys(keys[start : start + SLICE_KEYS * KEY_BYTES])
                column.append(join_keys(part_key(key, part) for key in named))
                await self._pause_if_due(len(named))
            columns.append(b"".join(column))
        return columns

    async def of_tokens(
        self,
        tokens: NDArray[np.integer],
        model_name: str = "",
        cache_salt: str = "",
        lora_name: str = "",
        *,
        held_only: bool = False,
    ) -> list[SelectedChunks]:
        """The keys of a prompt under each possible spec; empty without tokens. Raises as `select`."""
        if not tokens.size:
            return []
        namespaces = self._models.namespaces(model_name, lora_name)
        vocab_size = min((one.spec.vocab_size for one in namespaces if one.spec.vocab_size), default=0)
        unsigned = as_tokens(tokens, vocab_size)
        if any(tokens.size > MAX_KEYS * one.spec.chunk_size for one in namespaces):
            raise BadTokens(f"{tokens.size} tokens make more than {MAX_KEYS} chunks", limit=MAX_KEYS)
        if held_only:
            namespaces = [one for one in namespaces if self._layout.may_hold(one.spec.fingerprint)][-MAX_NAMESPACES:]
        key_count = self._check_count(unsigned, namespaces, model_name)
        chains = [self._chain(one, cache_salt) for one in namespaces]
        short_keys = SLICE_PAGES if any(one.spec.has_page_hashes for one in namespaces) else SHORT_KEYS
        if key_count <= short_keys and unsigned.size * len(chains) <= 2 * SLICE_TOKENS:
            await self._pause_if_due(key_count)
            keys = [chain.extend(unsigned) for chain in chains]
        else:
            keys = await self._compute_long(unsigned, chains)
        return [_of_chain(*one, unsigned) for one in zip(keys, chains, namespaces, strict=True)]

    def _of_keys(self, keys: bytes, fingerprint: bytes) -> SelectedChunks:
        """Chunks by key. Raises `BadChunkKey` if they have too many parts together."""
        spec = self._models.find_spec(fingerprint) if fingerprint else None
        if spec is None:
            return SelectedChunks(keys=keys, fingerprint=fingerprint)
        if len(spec.parts) > 1:
            check_keys(keys, limit=min(MAX_KEYS, MAX_SELECTED_KEYS // len(spec.parts)))
        return SelectedChunks(keys=keys, fingerprint=fingerprint, prompt=Prompt(spec, keys))

    async def _held_fingerprint(self, keys: bytes) -> bytes:
        """The spec under which the first held chunk was reported; empty if none is held."""
        for start in range(0, len(keys), KEY_BYTES):
            found = self._layout.fingerprint_of(keys[start : start + KEY_BYTES])
            if found is not None:
                return found
            if start % (SLICE_KEYS * KEY_BYTES) == KEY_BYTES:
                await asyncio.sleep(0)
        return b""

    def _chain(self, namespace: Namespace, cache_salt: str) -> PromptChain:
        spec = namespace.spec
        if spec.has_page_hashes:
            return PromptChain(self._root(namespace, ""), spec.chunk_size, page_seed(cache_salt))
        return PromptChain(self._root(namespace, cache_salt), spec.chunk_size)

    def _root(self, namespace: Namespace, cache_salt: str) -> ChunkKey:
        return root_key(
            namespace.spec.fingerprint, cache_salt=cache_salt, lora=namespace.lora_identity, secret=self._secret
        )

    def _check_count(self, tokens: Tokens, namespaces: Sequence[Namespace], model_name: str) -> int:
        """The number of keys in all namespaces together, of all parts. Raises `BadTokens` if there are too many."""
        key_count = sum(-(-tokens.size // one.spec.chunk_size) * len(one.spec.parts) for one in namespaces)
        if key_count > MAX_SELECTED_KEYS:
            raise BadTokens(
                f"tokens: {tokens.size} tokens make {key_count} keys under the {len(namespaces)} specs and adapters of "
                f"model {model_name[:MAX_SHOWN]!r}, at most {MAX_SELECTED_KEYS} are computed; send fewer tokens, or "
                "keys",
                limit=MAX_SELECTED_KEYS,
                spec_count=len(namespaces),
            )
        return key_count

    async def _pause_if_due(self, key_count: int) -> None:
        """Lets other tasks run after many short requests: a stream may carry thousands in one message."""
        self._keys_since_pause += key_count
        if self._keys_since_pause > SHORT_KEYS:
            self._keys_since_pause = 0
            await asyncio.sleep(0)

    async def _compute_long(self, tokens: Tokens, chains: Sequence[PromptChain]) -> list[bytes]:
        """The keys of a long request, after earlier long requests. Raises `Full`."""
        if self._waiting_count >= MAX_WAITING:
            raise Full(f"{MAX_WAITING} long requests by tokens are waiting; try again, or send keys")
        self._waiting_count += 1
        try:
            async with self._lock:
                return [await chain.extend_in_slices(tokens) for chain in chains]
        finally:
            self._waiting_count -= 1


def _of_chain(keys: bytes, chain: PromptChain, namespace: Namespace, tokens: Tokens) -> SelectedChunks:
    spec = namespace.spec
    if spec.has_page_hashes:
        return SelectedChunks(keys=keys, fingerprint=spec.fingerprint, prompt=Prompt(spec, keys))
    if not spec.ends_anywhere:
        keys = keys[: tokens.size // spec.chunk_size * KEY_BYTES]
        return SelectedChunks(keys=keys, fingerprint=spec.fingerprint, prompt=Prompt(spec, keys))
    prompt = Prompt(spec, keys, token_count=tokens.size, root=chain.root, tokens=tokens)
    return SelectedChunks(keys=keys, fingerprint=spec.fingerprint, prompt=prompt)


def _join(keys: Iterable[bytes]) -> bytes:
    """Raises `BadChunkKey` if one does not have 16 bytes."""
    listed = list(keys)
    if wrong := set(map(len, listed)) - {KEY_BYTES}:
        raise BadChunkKey(
            f"chunk_keys has a key of {min(wrong)} bytes; a key has {KEY_BYTES}",
            field="chunk_keys",
            size_bytes=min(wrong),
        )
    return b"".join(listed)
