"""Looks up the beginning of a prompt while the rest of it arrives, so that the choice of an engine is not delayed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import LmkvError
from lmkv.keys import KEY_BYTES
from lmkv.v1.cache_service_pb2 import LookupResponse
from lmkv_server.proxy.routing.key_lookup import KeyLookup, PrefixMatch
from lmkv_server.proxy.routing.prompt import PromptRequest
from lmkv_server.proxy.routing.prompt_keys import PromptKeys

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
