"""Picks the engine of a request: by the prompt that its instance holds, by session, and by load.

While a body arrives, its token ids are read, hashed and looked up in advance of its end, so that the choice is not
delayed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.errors import LmkvError
from lmkv.keys import KEY_BYTES
from lmkv.runtime import turns
from lmkv.v1.cache_service_pb2 import LookupResponse
from lmkv_server.http.guard import check_values
from lmkv_server.http.json_text import JsonText, NotJson
from lmkv_server.proxy.engine import Engine
from lmkv_server.proxy.metrics import PickerMetrics
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lmkv_server.proxy.picker.exchange import MAX_PART_BYTES
from lmkv_server.proxy.routing.health import NoHealthyEngine
from lmkv_server.proxy.routing.key_lookup import NO_MATCH, KeyLookup, PrefixMatch, PromptKeys
from lmkv_server.proxy.routing.lookup import cut_tokens, tokenize
from lmkv_server.proxy.routing.pools import EnginePool, HeldTokens
from lmkv_server.proxy.routing.prompt import ArrivingPrompt, PromptRequest, read_prompt
from lmkv_server.proxy.upstream.client import EngineFailed, EngineRejected, UpstreamClient, forwarded_headers
from lmkv_server.proxy.upstream.tokenization import NotTokenizable

logger = logging.getLogger(__name__)

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
    """The time at which the lookup began."""

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
        """The match of the last lookup that was answered."""
        self._due_count = FIRST_KEYS if self.chains.has_prefix_matches else None
        """Number of keys at which the next lookup is due; None while one is in flight, and if no more is due."""
        self._task: asyncio.Task[None] | None = None

    def add(self, tokens: NDArray[np.uint32], *, is_last: bool) -> None:
        """Takes the next tokens of the prompt. Unless they are its last, begins a lookup of all tokens if it is due."""
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


_NOTHING = msgspec.json.encode({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Picked:
    """The engine of a request."""

    engine: Engine
    uncached_count: int
    """Tokens of the prompt that it has to compute; 0 if that is not known."""


class EnginePicker:
    """Picks engines of a pool. `lookup` is None for policies that do not look up prompts."""

    def __init__(
        self,
        pool: EnginePool,
        clients: Mapping[Engine, UpstreamClient],
        lookup: KeyLookup | None,
        metrics: PickerMetrics,
        session_header: str,
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._lookup = lookup
        self._metrics = metrics
        self._session_header = session_header

    def arriving(self, caller: str, *, looks_ahead: bool) -> ArrivingBody:
        """A caller's body, which its parts are added to while they arrive; `looks_ahead` to look them up, too."""
        return ArrivingBody(caller, self._lookup, looks_ahead=looks_ahead)

    async def pick(
        self,
        prompt: PromptRequest,
        headers: Mapping[str, str],
        early: EarlyLookup | None,
        subset: Collection[str] | None,
    ) -> Picked:
        """The engine of a request; `early` is the lookup that has begun while its body arrived.

        Raises `NoHealthyEngine` if none of the subset, or none at all, is healthy.
        """
        candidates = [
            engine
            for engine in self._pool.engines
            if engine.is_available and (subset is None or address_of(engine) in subset)
        ]
        serving = [engine for engine in candidates if any(one.name == prompt.model_name for one in engine.models)]
        allowed = frozenset(serving or candidates)
        session = headers.get(self._session_header, "") or prompt.user
        excluded = [engine for engine in self._pool.engines if engine not in allowed]
        match, is_early = NO_MATCH, False
        if len(allowed) > 1:
            early = early if _is_looked_up_whole(prompt) else None
            found = early.match(prompt) if early is not None else None
            is_early = found is not None and (
                not found.is_open
                or self._pool.is_certain(
                    time.monotonic(),
                    session=session,
                    cached=found.cached,
                    at_most=found.at_most,
                    token_count=found.token_count,
                    excluded=excluded,
                )
            )
            match = found if found is not None and is_early else await self._match(prompt, headers, early)
        known = match.chains[0] if len(match.chains) == 1 else None
        held = HeldTokens(match.cached, match.token_count, known)
        now = time.monotonic()
        engine = self._pool.choose(now, session=session, cached=held, token_count=held.token_count, excluded=excluded)
        if engine is None:
            raise NoHealthyEngine
        self._pool.consider_copy(now, engine, held, excluded)
        self._count(match, engine.instance_id, is_early=is_early)
        return Picked(engine=engine, uncached_count=held.uncached_by(engine))

    def _count(self, match: PrefixMatch, instance_id: str, *, is_early: bool) -> None:
        """Records where a prompt goes, and counts what is held of it there."""
        if self._lookup is None:
            return

        def count(held: Mapping[str, int]) -> None:
            self._metrics.hit_tokens.inc(held.get(instance_id, 0))

        self._lookup.record(match, instance_id)
        if is_early:
            self._lookup.complete(match, count)
        else:
            count(match.held)

    async def _match(self, prompt: PromptRequest, headers: Mapping[str, str], early: EarlyLookup | None) -> PrefixMatch:
        """Returns the match of the prompt at each instance; it is empty if that is not known."""
        tokens = prompt.tokens
        if self._lookup is None or (tokens is None and not (prompt.has_text and self._lookup.is_ready)):
            return NO_MATCH
        if tokens is None or not _is_looked_up_whole(prompt):
            engine = self._pool.least_loaded()
            if engine is None:
                return NO_MATCH
            client = self._clients[engine]
            try:
                if tokens is None:
                    sent = forwarded_headers(_end_to_end(headers))
                    tokens = await tokenize(client, prompt.path, prompt.body, sent, prompt.text_prompt)
                else:
                    tokens = cut_tokens(client, prompt.path, prompt.body, tokens)
            except NotTokenizable as error:
                logger.debug("routed without a lookup: %s", error)
                self._metrics.lookups.labels("skipped").inc()
                return NO_MATCH
            except (EngineFailed, EngineRejected, TimeoutError, msgspec.DecodeError, ValueError) as error:
                self._lookup.failures.add(error)
                return NO_MATCH
        growing = early.chains if early is not None else None
        return await self._lookup.look_up(tokens, prompt.model_name, prompt.cache_salt, growing)


def address_of(engine: Engine) -> str:
    """`ip:port` of an engine."""
    return engine.url.partition("://")[2]


def _is_looked_up_whole(prompt: PromptRequest) -> bool:
    """Whether the engine takes all tokens of a prompt that is sent as token ids."""
    return prompt.path == COMPLETIONS and prompt.body.get("truncate_prompt_tokens") is None


def prompt_of(path: str, body: ArrivingBody | bytes | None) -> PromptRequest:
    """Returns the prompt that a body shows. Without a body, nothing is known of it."""
    if not body or path not in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
        return read_prompt(path, _NOTHING)
    try:
        return body.read(path) if isinstance(body, ArrivingBody) else read_prompt(path, body)
    except NotJson as error:  # the engine answers with its error
        logger.debug("routed without a lookup: the body is not JSON: %s", error)
        return read_prompt(path, _NOTHING)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers without the pseudo headers of HTTP/2."""
    return {name: value for name, value in headers.items() if not name.startswith(":")}


class ArrivingBody:
    """The parts of one body, which `caller` sends. Keys are computed if it `looks_ahead`, and there is a lookup."""

    def __init__(self, caller: str, lookup: KeyLookup | None, *, looks_ahead: bool) -> None:
        self._caller = caller
        self._is_looked_up = lookup is not None
        self._lookup = lookup if looks_ahead else None
        self._prompt = ArrivingPrompt()
        self.early: EarlyLookup | None = None
        """The lookup of the token ids so far, for the model and salt that the body has before them."""
        self.size_bytes = 0
        """Memory of the token ids."""
        self._decoded = JsonText()

    async def wait_for_part(self) -> None:
        """Waits until a part of this body may be read: of large bodies, one in an iteration of the event loop."""
        if self._decoded.text_bytes + MAX_PART_BYTES > turns.LARGE_BYTES:
            await turns.of_loop().read(self._caller)

    def add(self, part: bytes, *, is_last: bool) -> None:
        """Takes a part."""
        self._decoded.add(part)
        self._take(self._prompt.add(part, is_last=is_last), is_last=is_last)

    @property
    def decoded_bytes(self) -> int:
        """An upper bound of the memory that the body takes once it is decoded, its text included."""
        return self._decoded.size_bytes

    def check_values(self) -> None:
        """Raises `BodyTooLarge` if the body takes too long to decode."""
        check_values(self._decoded)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Inside, it is the turn of this body to be decoded."""
        return turns.of_loop().take(self._caller, self._decoded.text_bytes)

    def read(self, path: str) -> PromptRequest:
        """The request, once all parts were taken. Raises `NotJson`."""
        self._take(self._prompt.end(), is_last=True)
        if self.early is not None:
            self.early.stop()
        request = self._prompt.read(path, self._decoded, reads_prompt=self._is_looked_up)
        if not self._prompt.has_returned_tokens:
            self.early = None
        return request

    def clear(self) -> None:
        """Ends the lookup, and frees what was read. Idempotent."""
        if self.early is not None:
            self.early.stop()
        self._prompt, self.early, self.size_bytes, self._decoded = ArrivingPrompt(), None, 0, JsonText()

    def _take(self, tokens: NDArray[np.uint32], *, is_last: bool) -> None:
        self.size_bytes += tokens.nbytes
        if not tokens.size or self._lookup is None:
            return
        if self.early is None:
            before = PromptRequest(path="", body=self._prompt.fields)
            self.early = EarlyLookup(self._lookup, before.model_name, before.cache_salt)
        self.early.add(tokens, is_last=is_last)
