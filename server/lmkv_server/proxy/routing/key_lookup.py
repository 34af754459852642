"""Looks prompts up by the keys of their chunks, their beginnings while the rest arrives.

A lookup of 100,000 tokens then sends 6 KB instead of 400 KB, and costs the coordinator no hashing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import LmkvError, Unreachable
from lmkv.keys import KEY_BYTES, split_keys
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.rpc.prompts import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv_server.proxy.routing.lookup import LookupFailures, RoutingCounters
from lmkv_server.proxy.routing.pools import RecentPicks
from lmkv_server.proxy.routing.prompt import GrowingChains, Namespaces, PromptKeys, PromptRequest, ServedNamespace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """A prompt that was looked up."""

    held: Mapping[str, int]
    """The number of leading tokens that each instance holds, as the coordinator reports it."""
    cached: Mapping[str, int]
    """The same, with what instances will hold soon."""
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
        """What instances hold of a prompt, and will hold soon; after a failure only the latter. Never raises.

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
        """What instances hold of each chain. Raises the coordinator's error, or `Unreachable`."""
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


FIRST_KEYS = 16
"""Number of keys of the first lookup of an arriving prompt. Each further one has at least twice as many."""
MAX_AGE_SECONDS = 1.0
"""Older matches are not used: the layout map has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyMatch:
    """The answers to a lookup of the first chunks, at least one in each namespace."""

    held: Mapping[str, int]
    """The number of tokens that each instance holds of them."""
    open_ids: frozenset[str]
    """The instances that hold all of them, and so may hold more of the prompt; others do not."""
    time: float
    """When the lookup began."""

    @classmethod
    def of(cls, answers: Iterable[tuple[PromptKeys, LookupResponse]], time: float) -> Self:
        """The match of a lookup that began at `time`. Each answer comes with the keys that it is about."""
        held: dict[str, int] = {}
        open_ids = set()
        for chain, answer in answers:
            for holder in answer.holders:
                held[holder.instance_id] = max(held.get(holder.instance_id, 0), holder.matched_token_count)
                if holder.matched_chunk_count == len(chain.keys) // KEY_BYTES:
                    open_ids.add(holder.instance_id)
        return cls(held=held, open_ids=frozenset(open_ids), time=time)

    def at_most(self, token_count: int) -> Mapping[str, int]:
        """The most tokens that each instance may hold of a prompt of `token_count` tokens."""
        return {**self.held, **dict.fromkeys(self.open_ids, token_count)}


class EarlyLookup:
    """The keys of one arriving prompt, and lookups of those that are known. `stop` must be called at its end."""

    def __init__(self, lookup: KeyLookup, model_name: str, cache_salt: str) -> None:
        """A name or salt that turns out to be another makes the keys and the match void."""
        self.chains = lookup.chains(model_name, cache_salt)
        """The keys of the tokens so far."""
        self._lookup = lookup
        self._match: EarlyMatch | None = None
        """Of the last lookup that was answered."""
        self._due_count = FIRST_KEYS if self.chains.has_prefix_matches else None
        """Number of keys at which the next lookup is due; None while one is in flight, and if no more is due."""
        self._task: asyncio.Task[None] | None = None

    def add(self, tokens: NDArray[np.uint32], *, is_last: bool) -> None:
        """Takes the next tokens of the prompt. Unless they are its last ones, begins a lookup of all if that is due."""
        self.chains.add(tokens)
        if not is_last and not self._lookup.failures.is_failing and (due := self._take_due()):
            self._task = asyncio.create_task(self._look_up(due), name="lmkv-early-lookup")

    def stop(self) -> None:
        """Cancels the lookup in flight, whose answer would be too late. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def match(self, prompt: PromptRequest) -> PrefixMatch | None:
        """The match of the whole prompt by the last answer; None if there is none, or if it is too old or void."""
        found = self._match
        if found is None or time.monotonic() - found.time > MAX_AGE_SECONDS:
            return None
        namespaces = self._lookup.namespaces(prompt.model_name)
        if not self.chains.is_of(namespaces, prompt.cache_salt, prompt.token_count):
            return None
        return self._lookup.match(self.chains.all(), found.held, prompt.token_count, found.at_most(prompt.token_count))

    def _take_due(self) -> list[PromptKeys]:
        """The keys of the full chunks so far if a lookup of them is due, and due no more then; otherwise nothing."""
        if self._due_count is None:
            return []
        chains = self.chains.full()
        if _key_count(chains) < self._due_count:
            return []
        self._due_count = None
        return chains

    async def _look_up(self, due: Sequence[PromptKeys]) -> None:
        """Looks up keys, and then more of them while an instance holds all."""
        while due:
            begin = time.monotonic()
            try:
                answers = await self._lookup.responses(due)
            except LmkvError as error:  # the lookup of the whole prompt counts its own
                logger.debug("the beginning of a prompt was not looked up: %s", error)
                return
            self._match = EarlyMatch.of(zip(due, answers, strict=True), begin)
            if not self._match.open_ids:
                return
            self._due_count = 2 * _key_count(due)
            due = self._take_due()


def _key_count(chains: Sequence[PromptKeys]) -> int:
    """The number of keys that each chain has at least."""
    return min(len(one.keys) for one in chains) // KEY_BYTES
