"""Looks prompts up by the keys of their chunks, which are computed here, also while a prompt arrives.

A lookup of 100,000 tokens then sends 6 KB instead of 400 KB, and costs the coordinator no hashing. The keys are those
of each namespace that the prompt may be of: a spec or LoRA adapter by the name under which engines serve it, as
instances register it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec, LmkvError, Unreachable
from lmkv.keys import KEY_BYTES, MAX_KEYS, ChunkKey, page_keys, page_seed, root_key, split_keys
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.messages import by_keys
from lmkv.spec import KvSpec
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.prompt_pb2 import PromptSelector
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_kernels import chunk_keys
from lmkv_server.proxy.routing.lookup import LookupFailures, RoutingCounters
from lmkv_server.proxy.routing.pools import RecentPicks

logger = logging.getLogger(__name__)


class GrowingKeys:
    """The keys of one prompt for one spec and adapter; of a longer prompt the first `MAX_KEYS`."""

    def __init__(self, spec: KvSpec, lora_identity: str, cache_salt: str, secret: bytes) -> None:
        self._spec = spec
        salt = "" if spec.has_page_hashes else cache_salt  # which a page's digest has
        self._root = root_key(spec.fingerprint, cache_salt=salt, lora=lora_identity, secret=secret)
        self._before: bytes = page_seed(cache_salt) if spec.has_page_hashes else self._root
        """The key of the chunk, or the digest of the page, that the next full chunk follows."""
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
            if not one.lora_identity and one.spec.has_tokens
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

    def names(self, token_counts: Sequence[int]) -> list[bytes]:
        """Names the prefixes of these numbers of tokens; empty of one without a full chunk."""
        ends = (count // self.chunk_size * KEY_BYTES for count in token_counts)
        return [self.keys[end - KEY_BYTES : end] if end else b"" for end in ends]

    def prefix(self, token_count: int) -> PromptSelector:
        """Selects a prefix, up to its last full chunk."""
        end = token_count // self.chunk_size * KEY_BYTES
        return by_keys(split_keys(self.keys[:end]), fingerprint=self.fingerprint)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """A prompt that was looked up."""

    held: Mapping[str, int]
    """The number of leading tokens that each instance holds, as the coordinator reports it."""
    cached: Mapping[str, int]
    """Cached chunks as above, with those that instances will hold soon."""
    at_most: Mapping[str, int]
    """The most that `cached` may be after a lookup of the whole prompt."""
    is_open: bool
    """Whether instances may hold more than `held`."""
    chains: Sequence[PromptKeys]
    token_count: int


NO_MATCH = PrefixMatch(held={}, cached={}, at_most={}, is_open=False, chains=(), token_count=0)


LIST_TIMEOUT_SECONDS = 5.0
REFRESH_SECONDS = 2.0
"""Time between two lists of the fleet's specs and adapters."""
PAUSE_SECONDS = 1.0
"""While lookups fail, one is tried per this time; other requests do not wait for it."""


class KeyLookup:
    """Looks up prompts at a coordinator. A request whose lookup fails is routed by load alone.

    `run` must run: it keeps the list of specs and adapters.
    """

    def __init__(self, client: CoordinatorClient, counters: RoutingCounters, secret: bytes = b"") -> None:
        """`secret` is the fleet's cluster secret. The caller closes `client`, after this."""
        self._client = client
        self._stream = client.lookup_stream()
        self.failures = LookupFailures(logger, counters)
        self._counters = counters
        self._secret = secret
        self._namespaces: Namespaces | None = None
        self._list_error: LmkvError = Unreachable("no coordinator has listed its instances yet")
        self._recent = RecentPicks()
        self._routed: list[tuple[Sequence[PromptKeys], str, float]] = []
        """Chains, instance and time of prompts that `_recent` does not have yet."""
        self._retry_time = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        """Lookups that no request waits for."""

    @property
    def is_ready(self) -> bool:
        """Whether the fleet's specs are known."""
        return self._namespaces is not None

    async def aclose(self) -> None:
        """Cancels the lookups that no request waits for, and ends the stream of lookups."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stream.aclose()

    async def run(self) -> None:
        """Lists the fleet's specs and adapters periodically, until it is cancelled."""
        while True:
            try:
                self._namespaces = Namespaces(await self._client.instances(LIST_TIMEOUT_SECONDS))
            except LmkvError as error:
                logger.debug("the instances cannot be listed: %s", error)
                self._list_error = error  # such as a token without the permission
            await asyncio.sleep(REFRESH_SECONDS)

    def namespaces(self, model_name: str) -> list[ServedNamespace]:
        """The possible namespaces of a prompt, of those that are known now."""
        return self._namespaces.of(model_name) if self._namespaces is not None else []

    def chains(self, model_name: str, cache_salt: str) -> GrowingChains:
        """The keys of a prompt in each of its possible namespaces, of which there are no tokens yet."""
        return GrowingChains(self.namespaces(model_name), cache_salt, self._secret)

    async def look_up(
        self, tokens: NDArray[np.uint32], model_name: str, cache_salt: str = "", growing: GrowingChains | None = None
    ) -> PrefixMatch:
        """Returns how much of a prompt each instance holds, or will hold soon: after a failure only that. Never raises.

        `growing` has the prompt's keys if it began with the same name and salt, and has got all tokens.
        """
        if self._namespaces is None:
            self.failures.add(self._list_error)
            return NO_MATCH
        namespaces = self._namespaces.of(model_name)
        if not namespaces:  # an adapter, at its first use
            logger.debug("routed without a lookup: no engine has registered %r", model_name)
            self._counters.lookups.labels("miss").inc()
            return NO_MATCH
        if growing is None or not growing.is_of(namespaces, cache_salt, tokens.size):
            growing = self.chains(model_name, cache_salt)
            growing.add(tokens)
        chains = growing.all()
        held = await self._held_tokens(chains, tokens.size)
        return self.match(chains, held, tokens.size, held)

    async def responses(self, chains: Sequence[PromptKeys]) -> list[LookupResponse]:
        """Returns how much of each chain the instances hold. Raises the coordinator's error, or `Unreachable`."""
        requests = (LookupRequest(prompt=by_keys(split_keys(one.keys), fingerprint=one.fingerprint)) for one in chains)
        return await asyncio.gather(*map(self._stream.lookup, requests))

    def match(
        self, chains: Sequence[PromptKeys], held: Mapping[str, int], token_count: int, at_most: Mapping[str, int]
    ) -> PrefixMatch:
        """The match by the tokens that instances hold, and hold at most, with what they will hold soon."""
        self._record_routed()
        soon: dict[str, int] = {}
        now = time.monotonic()
        for chain in chains:
            for instance_id, count in self._recent.matches(chain.keys, now).items():
                soon[instance_id] = max(soon.get(instance_id, 0), min(count * chain.chunk_size, token_count))
        return PrefixMatch(
            held=held,
            cached=_most(held, soon),
            at_most=_most(at_most, soon),
            is_open=held != at_most,
            chains=chains,
            token_count=token_count,
        )

    def complete(self, match: PrefixMatch, on_held: Callable[[Mapping[str, int]], None]) -> None:
        """Counts a match of an early lookup, and calls `on_held` with what instances hold.

        If an instance may hold more, it is looked up first; no request waits for it.
        """
        if match.is_open:
            task = asyncio.create_task(self._complete(match, on_held), name="lmkv-lookup")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._count(match.held, match.token_count)
            on_held(match.held)

    def record(self, match: PrefixMatch, instance_id: str) -> None:
        """Records that a prompt was routed to an instance, which will hold it soon.

        Must be called in the event loop. What it costs, the answer to the request does not wait for.
        """
        if instance_id and match.chains:
            self._routed.append((match.chains, instance_id, time.monotonic()))
            asyncio.get_running_loop().call_soon(self._record_routed)

    def _record_routed(self) -> None:
        routed, self._routed = self._routed, []
        for chains, instance_id, routed_time in routed:
            for chain in chains:
                self._recent.add(chain.keys, instance_id, routed_time)

    async def _complete(self, match: PrefixMatch, on_held: Callable[[Mapping[str, int]], None]) -> None:
        on_held(await self._held_tokens(match.chains, match.token_count))

    async def _held_tokens(self, chains: Sequence[PromptKeys], token_count: int) -> Mapping[str, int]:
        """The number of leading tokens that each instance holds, as the coordinator reports it; empty on a failure."""
        if self.failures.is_failing and time.monotonic() < self._retry_time:
            self._counters.lookups.labels("skipped").inc()
            return {}
        self._retry_time = time.monotonic() + PAUSE_SECONDS
        held: dict[str, int] = {}
        try:
            for response in await self.responses(chains):
                for holder in response.holders:
                    held[holder.instance_id] = max(held.get(holder.instance_id, 0), holder.matched_token_count)
        except LmkvError as error:
            self.failures.add(error)
            return {}
        self.failures.clear()
        self._count(held, token_count)
        return held

    def _count(self, held: Mapping[str, int], token_count: int) -> None:
        self._counters.asked_tokens.inc(token_count)
        self._counters.lookups.labels("hit" if held else "miss").inc()


def _most(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    """The larger number of each instance."""
    return {one: max(first.get(one, 0), second.get(one, 0)) for one in {**first, **second}}
