"""Which chunks a request names, by tokens or by keys: the same for all requests of `CacheService`.

Long key chains are computed in slices, one chain at a time, so that the event loop serves other calls between slices
and a call that is cancelled stops its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadSelection, BadTokens, Full, ModelNotFound
from lmkv.keys import KEY_BYTES, MAX_KEYS, Tokens, as_tokens, check_keys, root_key
from lmkv_kernels import chunk_keys
from lmkv_server.coordinator.core.instance_info import MAX_SHOWN
from lmkv_server.coordinator.core.models import Models, Namespace

MAX_SELECTED_KEYS = 2 * MAX_KEYS
"""Most keys that one request by tokens may need, over all specs of its model: 2 MiB."""
MAX_NAMESPACES = 16
"""Most specs and adapters of one name that a lookup is made under, those registered last."""
SHORT_KEYS = 4096
"""Requests of at most this many keys are computed at once: about a millisecond."""
SLICE_KEYS = 2048
SLICE_TOKENS = 65_536
"""Work between two looks at what else there is to do: at most about half a millisecond."""
MAX_WAITING = 64
"""Long requests of one tenant that wait for their turn; each holds at most a message."""


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
    """Turns what requests name into keys, under the names, specs and LoRA adapters that are registered.

    `holds` says whether chunks of a fingerprint may be in the layout map: lookups skip specs without
    chunks.
    """

    def __init__(
        self,
        models: Models,
        cluster_secret: bytes = b"",
        holds: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        self._models = models
        self._secret = cluster_secret
        self._holds = holds
        self._turn = asyncio.Lock()
        self._waiting_count = 0
        self._unbroken_keys = 0
        """Keys that short requests have computed since the event loop last had a turn."""

    async def select(self, request: NamesChunks, *, held_only: bool = False) -> list[Selection]:
        """What a request names: nothing, the keys it gives, or the keys of its tokens under each spec of its model.

        Tokens name nothing while no engine has registered. With `held_only`, specs that no instance holds chunks of are
        left out.

        Raises `BadTokens`, `BadChunkKey`, `ModelNotFound`, `ModelAmbiguous`, `Full`.
        """
        if not request.chunk_keys:
            tokens = np.array(request.tokens, dtype=np.int32)
            return await self.of_tokens(
                tokens, request.model_name, request.cache_salt, request.lora_name, held_only=held_only
            )
        if request.tokens:
            raise BadTokens("chunks are named by tokens and by chunk_keys; use one of the two")
        if request.model_name:
            self._models.namespaces(request.model_name)
        return [Selection(keys=check_keys(request.chunk_keys))]

    async def required(self, request: NamesChunks) -> list[Selection]:
        """As `select`, for requests that need chunks: never empty.

        Raises `BadSelection`, or `ModelNotFound` if no engine has registered, too.
        """
        selections = await self.select(request)
        if not selections and any(True for _ in request.tokens):
            raise ModelNotFound("no engine has registered yet, so that nothing is stored", known_models="")
        if not selections:
            raise BadSelection("no chunk is named; set tokens or chunk_keys")
        return selections

    async def of_tokens(
        self,
        tokens: NDArray[np.integer],
        model_name: str = "",
        cache_salt: str = "",
        lora_name: str = "",
        *,
        held_only: bool = False,
    ) -> list[Selection]:
        """The keys of a prompt under each spec that it can be meant under; none without tokens. Raises as `select`."""
        if not tokens.size:
            return []
        namespaces = self._models.namespaces(model_name, lora_name)
        vocab_size = min((one.spec.vocab_size for one in namespaces if one.spec.vocab_size), default=0)
        unsigned = as_tokens(tokens, vocab_size)
        if any(tokens.size > MAX_KEYS * one.spec.chunk_size for one in namespaces):
            raise BadTokens(f"{tokens.size} tokens make more than {MAX_KEYS} chunks", limit=MAX_KEYS)
        if held_only:
            namespaces = [one for one in namespaces if self._holds(one.spec.fingerprint)][-MAX_NAMESPACES:]
        key_count = self._check_count(unsigned, namespaces, model_name)
        chains = [(self._root(one, cache_salt), one.spec.chunk_size) for one in namespaces]
        if key_count <= SHORT_KEYS and unsigned.size * len(chains) <= 2 * SLICE_TOKENS:
            await self._breathe(key_count)
            keys = [chunk_keys(unsigned, root, chunk_size) for root, chunk_size in chains]
        else:
            keys = await self._in_turn(unsigned, chains)
        return [
            Selection(keys=own, fingerprint=one.spec.fingerprint) for own, one in zip(keys, namespaces, strict=True)
        ]

    def _root(self, namespace: Namespace, cache_salt: str) -> bytes:
        return root_key(
            namespace.spec.fingerprint, cache_salt=cache_salt, lora=namespace.lora_identity, secret=self._secret
        )

    def _check_count(self, tokens: Tokens, namespaces: Sequence[Namespace], model_name: str) -> int:
        """How many keys a prompt has in all namespaces together. Raises `BadTokens` if that is too many."""
        key_count = sum(-(-tokens.size // one.spec.chunk_size) for one in namespaces)
        if key_count > MAX_SELECTED_KEYS:
            raise BadTokens(
                f"tokens: {tokens.size} tokens make {key_count} keys under the {len(namespaces)} specs and adapters of "
                f"model {model_name[:MAX_SHOWN]!r}, at most {MAX_SELECTED_KEYS} are computed; send fewer tokens, or "
                "chunk_keys",
                limit=MAX_SELECTED_KEYS,
                spec_count=len(namespaces),
            )
        return key_count

    async def _breathe(self, key_count: int) -> None:
        """Gives others a turn after many short requests: a stream may carry thousands in one message."""
        self._unbroken_keys += key_count
        if self._unbroken_keys > SHORT_KEYS:
            self._unbroken_keys = 0
            await asyncio.sleep(0)

    async def _in_turn(self, tokens: Tokens, chains: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """The keys of a long request, after the long requests that came before it. Raises `Full`."""
        if self._waiting_count >= MAX_WAITING:
            raise Full(f"{MAX_WAITING} long requests by tokens wait already; try again, or send chunk_keys")
        self._waiting_count += 1
        try:
            async with self._turn:
                return [await _in_slices(tokens, root, chunk_size) for root, chunk_size in chains]
        finally:
            self._waiting_count -= 1


async def _in_slices(tokens: Tokens, root: bytes, chunk_size: int) -> bytes:
    """The keys of a prompt; the event loop has a turn after each slice."""
    step = max(min(SLICE_KEYS, SLICE_TOKENS // chunk_size), 1) * chunk_size
    parts = []
    for start in range(0, tokens.size, step):
        parts.append(chunk_keys(tokens[start : start + step], root, chunk_size))
        root = parts[-1][-KEY_BYTES:]
        await asyncio.sleep(0)
    return b"".join(parts)
