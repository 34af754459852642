"""Looks prompts up by the keys of their chunks, which are computed here, over one stream to a coordinator.

A lookup of 100,000 tokens then sends 6 KB instead of 400 KB, and costs the coordinator no hashing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import LmkvError, ModelNotFound, Unreachable
from lmkv.keys import KEY_BYTES
from lmkv.rpc.failover import Failover
from lmkv.rpc.lookup_call import LookupCall
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest, ListInstancesResponse
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_server.proxy.routing.early_match import MAX_AGE_SECONDS, EarlyMatch
from lmkv_server.proxy.routing.growing_chains import GrowingChains, PromptKeys
from lmkv_server.proxy.routing.lookup import LookupFailures, RoutingCounters
from lmkv_server.proxy.routing.namespaces import Namespaces
from lmkv_server.proxy.routing.recent_picks import RecentPicks

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""Time between two lists of the fleet's specs and adapters."""
LIST_TIMEOUT_SECONDS = 5.0
PAUSE_SECONDS = 1.0
"""While lookups fail, one is tried per this time; other requests do not wait for it."""
_LIST = "lmkv.v1.RegistryService/ListInstances"


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


class KeyLookup:
    """Looks up prompts at a coordinator; at the next one if that is unreachable.

    `run` must run: it keeps the list of specs and adapters. A request whose lookup fails is routed by load alone.
    `secret` is the fleet's cluster secret.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        timeout_seconds: float,
        counters: RoutingCounters,
        secret: bytes = b"",
    ) -> None:
        self._channels = {address: rpc.open_channel(address, credentials) for address in addresses}
        self._coordinators = Failover(addresses)
        self._timeout_seconds = timeout_seconds
        self._counters = counters
        self._secret = secret
        self._namespaces: Namespaces | None = None
        self._list_error: LmkvError | None = None
        self._call: LookupCall | None = None
        self._failures = LookupFailures(logger, counters)
        self._recent = RecentPicks()
        self._routed: list[tuple[Sequence[PromptKeys], str, float]] = []
        """Chains, instance and time of prompts that `_recent` does not have yet."""
        self._retry_time = 0.0
        self._tasks: set[asyncio.Task[object]] = set()
        """Lookups that no request waits for."""

    @property
    def is_ready(self) -> bool:
        """Whether the fleet's specs are known."""
        return self._namespaces is not None

    def failed(self, error: Exception) -> None:
        """Counts a lookup that could not be prepared."""
        self._failures.add(error)

    async def aclose(self) -> None:
        """Closes the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._call is not None:
            await self._call.aclose()
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def run(self) -> None:
        """Lists the fleet's specs and adapters periodically, until it is cancelled."""
        while True:
            address = self._coordinators.current
            try:
                self._namespaces = Namespaces(await self._list(address))
            except LmkvError as error:
                logger.debug("the instances cannot be listed: %s", error)
                self._list_error = error  # such as a token without the permission
                if isinstance(error, Unreachable):
                    self._coordinators.report_failure(address)
            await asyncio.sleep(REFRESH_SECONDS)

    def begin(self, model_name: str, cache_salt: str) -> GrowingChains | None:
        """The keys of a prompt that arrives, of which there are no tokens yet; None if it has no namespace."""
        namespaces = self._namespaces.of(model_name) if self._namespaces is not None else []
        return GrowingChains(namespaces, cache_salt, self._secret) if namespaces else None

    def look_ahead(self, growing: GrowingChains) -> None:
        """Begins to look up what has arrived of a prompt, if that is due."""
        if not self._failures.is_failing and (asked := growing.ask()):
            self._begin(self._look_ahead(growing, asked))

    def early_match(
        self, token_count: int, model_name: str, cache_salt: str, growing: GrowingChains | None
    ) -> PrefixMatch | None:
        """The match of a prompt by the last lookup while it arrived; None if there is none, or it is too old."""
        now = time.monotonic()
        if growing is None or growing.early is None or now - growing.early.time > MAX_AGE_SECONDS:
            return None
        namespaces = self._namespaces.of(model_name) if self._namespaces is not None else []
        if not growing.is_of(namespaces, cache_salt, token_count):
            return None
        return self._match(growing.all(), growing.early.held, token_count, growing.early.at_most(token_count))

    async def look_up(
        self, tokens: NDArray[np.uint32], model_name: str, cache_salt: str = "", growing: GrowingChains | None = None
    ) -> PrefixMatch:
        """What instances hold of a prompt, and will hold soon; after a failure only the latter. Never raises.

        `growing` has the prompt's keys if it began with the same name and salt, and has got all tokens.
        """
        try:
            chains = self._chains(tokens, model_name, cache_salt, growing)
        except ModelNotFound as error:  # an adapter, at its first use
            logger.debug("routed without a lookup: %s", error)
            self._counters.lookups.labels("miss").inc()
            return NO_MATCH
        except LmkvError as error:
            self._failures.add(error)
            return NO_MATCH
        held = await self._held_tokens(chains, tokens.size)
        return self._match(chains, held, tokens.size, held)

    def complete(self, match: PrefixMatch, on_held: Callable[[Mapping[str, int]], None]) -> None:
        """Counts a match that `early_match` has found, and calls `on_held` with what instances hold.

        If an instance may hold more, it is looked up first; no request waits for it.
        """
        if match.is_open:
            self._begin(self._complete(match, on_held))
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

    def _chains(
        self, tokens: NDArray[np.uint32], model_name: str, cache_salt: str, growing: GrowingChains | None
    ) -> list[PromptKeys]:
        """The prompt's keys in each possible namespace. Raises `ModelNotFound`, or why no namespace is known."""
        if self._namespaces is None:
            raise self._list_error or Unreachable("no coordinator has listed its instances yet")
        namespaces = self._namespaces.of(model_name)
        if not namespaces:
            raise ModelNotFound(f"no engine has registered {model_name!r}", model_name=model_name, known_models="")
        if growing is None or not growing.is_of(namespaces, cache_salt, tokens.size):
            growing = GrowingChains(namespaces, cache_salt, self._secret)
            growing.add(tokens)
        return growing.all()

    def _match(
        self, chains: Sequence[PromptKeys], held: Mapping[str, int], token_count: int, at_most: Mapping[str, int]
    ) -> PrefixMatch:
        """The match with what instances will hold soon."""
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

    async def _look_ahead(self, growing: GrowingChains, asked: Sequence[PromptKeys]) -> None:
        while asked:
            begin = time.monotonic()
            try:
                answers = await self._look_up(_requests(asked))
            except (LmkvError, TimeoutError) as error:  # the lookup of the whole prompt counts its own
                logger.debug("the begin of a prompt was not looked up: %s", error)
                growing.stop_asking()
                return
            key_counts = (len(one.keys) // KEY_BYTES for one in asked)
            growing.answer(_early_match(zip(key_counts, answers, strict=True), begin))
            asked = growing.ask()

    async def _complete(self, match: PrefixMatch, on_held: Callable[[Mapping[str, int]], None]) -> None:
        on_held(await self._held_tokens(match.chains, match.token_count))

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work, name="lmkv-lookup")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _count(self, held: Mapping[str, int], token_count: int) -> None:
        self._counters.asked_tokens.inc(token_count)
        self._counters.lookups.labels("hit" if held else "miss").inc()

    async def _held_tokens(self, chains: Sequence[PromptKeys], token_count: int) -> Mapping[str, int]:
        """The number of leading tokens that each instance holds, as the coordinator reports it; empty on a failure."""
        if self._failures.is_failing and time.monotonic() < self._retry_time:
            self._counters.lookups.labels("skipped").inc()
            return {}
        self._retry_time = time.monotonic() + PAUSE_SECONDS
        held: dict[str, int] = {}
        try:
            for response in await self._look_up(_requests(chains)):
                for holder in response.holders:
                    held[holder.instance_id] = max(held.get(holder.instance_id, 0), holder.matched_token_count)
        except (LmkvError, TimeoutError) as error:
            self._failures.add(error)
            return {}
        self._failures.clear()
        self._count(held, token_count)
        return held

    async def _look_up(self, requests: Sequence[LookupRequest]) -> list[LookupResponse]:
        address = self._coordinators.current
        try:
            async with asyncio.timeout(self._timeout_seconds):
                call = self._open(address)
                return await asyncio.gather(*(call.lookup(request) for request in requests))
        except TimeoutError:
            self._coordinators.report_failure(address)
            raise
        except Unreachable:
            self._coordinators.report_failure(address)
            raise

    def _open(self, address: str) -> LookupCall:
        """The stream to a coordinator, which is opened if there is none."""
        if self._call is None or self._call.has_ended or self._call.address != address:
            if self._call is not None:
                self._call.end()
            self._call = LookupCall(CacheServiceStub(self._channels[address]), address)
        return self._call

    async def _list(self, address: str) -> list[Instance]:
        registry: Any = RegistryServiceStub(self._channels[address])
        instances: list[Instance] = []
        request = ListInstancesRequest()
        while True:
            response = cast(
                ListInstancesResponse,
                await rpc.call(registry.ListInstances, _LIST, address, request, LIST_TIMEOUT_SECONDS),
            )
            instances += response.instances
            if not response.next_page_token:
                return instances
            request = ListInstancesRequest(page_token=response.next_page_token)


def _requests(chains: Sequence[PromptKeys]) -> list[LookupRequest]:
    return [LookupRequest(chunk_keys=one.keys, fingerprint=one.fingerprint) for one in chains]


def _most(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    """The larger number of each instance."""
    return {one: max(first.get(one, 0), second.get(one, 0)) for one in {**first, **second}}


def _early_match(answers: Iterable[tuple[int, LookupResponse]], time: float) -> EarlyMatch:
    """The match of a lookup. Each answer comes with the number of keys that it is about."""
    held: dict[str, int] = {}
    open_ids = set()
    for key_count, answer in answers:
        for holder in answer.holders:
            held[holder.instance_id] = max(held.get(holder.instance_id, 0), holder.matched_token_count)
            if holder.matched_chunk_count == key_count:
                open_ids.add(holder.instance_id)
    return EarlyMatch(held=held, open_ids=frozenset(open_ids), time=time)
