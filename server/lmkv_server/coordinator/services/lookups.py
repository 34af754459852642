"""Answers lookups: those of everyone (`CacheService`), and those of nodes (`LookupService`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeVar

from lmkv import rpc
from lmkv.auth.caller import count_request
from lmkv.errors import BadChunkKey, LmkvError
from lmkv.internal.v1 import lookup_service_pb2 as internal_pb
from lmkv.internal.v1 import lookup_service_pb2_grpc as internal_pb_grpc
from lmkv.keys import KEY_BYTES, ChunkKey, check_keys, check_prefix_digests, split_keys
from lmkv.prompt import MAX_BEGINNINGS, Prompt
from lmkv.rpc.requests import delay_refusal
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_server.coordinator.core.history import LatencyHistogram
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, Match, tier_id
from lmkv_server.coordinator.core.match import UnpreparedError, match_of, prefixes, with_tails
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import SHORT_KEYS, SelectedChunks, Selector

ANSWER_BYTES = rpc.MAX_MESSAGE_BYTES // 2
"""Size of the answers that share a message on a stream: half of the message limit."""
MAX_ANSWERS = 64
"""Answers per message: about a millisecond of work. Sending it lets other tasks run."""
MATCH_KEYS = 64
"""The work of matching one instance whose hit is its prefix, as a number of keys to read."""
MAX_ALTERNATIVES = 1024
"""Most keys of a lookup with `any_key`: about a millisecond of work."""

StreamResponse = TypeVar("StreamResponse", pb.LookupStreamResponse, internal_pb.LookupStreamResponse)


class LookupAnswers:
    """Fills in the responses of lookups in one tenant's layout map."""

    def __init__(self, registry: Registry, selector: Selector) -> None:
        self._registry = registry
        self._selector = selector
        self._long = asyncio.Lock()
        self._work = 0
        """Since other tasks last ran, as a number of keys to read."""
        self.latencies = LatencyHistogram()
        """Latencies of the lookups that were answered; a hit found at least one holder."""

    async def answer(
        self,
        begin: float,
        selections: Sequence[SelectedChunks],
        response: pb.LookupResponse | internal_pb.LookupResponse,
        excluded: str = "",
        *,
        is_probe: bool = False,
    ) -> None:
        """Fills in `response`: adding a finished message to another one would copy it.

        `begin` is when the lookup arrived. A health probe names nothing, and is not counted.
        """
        found: list[list[Match]] = []
        read_count = 0
        for selection in selections:
            found.append(await self._match(selection, excluded))
            read_count += len(selection)
            if read_count > SHORT_KEYS:
                read_count = 0
                await asyncio.sleep(0)
        matches = found[0] if len(found) == 1 else longest_first(match for part in found for match in part)
        self.finish(begin, matches, response, is_probe=is_probe)

    async def _match(self, selection: SelectedChunks, excluded: str) -> list[Match]:
        """The longest hit of each instance but `excluded`, the longest first.

        Of prompts whose hits have other items than their first chunks, long ones are matched one at a time.
        """
        layout, prompt, parted = self._registry.layout, selection.prompt, selection.parted
        if parted is None:
            found = layout.lookup(selection.keys, excluded)
            if prompt is None or not prompt.may_end_behind(0):
                return found
            matches = with_tails(layout, prompt, found, found, excluded)
        else:
            before = prefixes(layout, parted, excluded)
            if not before and not parted.may_end_behind(0):
                return []
            async with self._long if len(selection) > SHORT_KEYS else nullcontext():
                matches = await self._match_parts(parted, before)
            matches = with_tails(layout, parted, matches, before, excluded)
        matches.sort(key=lambda match: (-match.token_count, match.instance_id))
        return matches

    async def _match_parts(self, prompt: Prompt, before: Sequence[Match]) -> list[Match]:
        matches = []
        longest = max((prefix.chunk_count for prefix in before), default=0)
        for prefix in before:
            try:
                match = match_of(self._registry.layout, prompt, prefix)
            except UnpreparedError:
                await self._selector.prepare(prompt, longest)
                match = match_of(self._registry.layout, prompt, prefix)
            if match:
                matches.append(match)
            lacking_count = prefix.chunk_count - (match.chunk_count if match else 0)
            await self._pause_if_due(MATCH_KEYS + lacking_count * len(prompt.spec.parts))
        return matches

    async def _pause_if_due(self, work: int) -> None:
        self._work += work
        if self._work > SHORT_KEYS:
            self._work = 0
            await asyncio.sleep(0)

    def finish(
        self,
        begin: float,
        matches: Iterable[Match],
        response: pb.LookupResponse | internal_pb.LookupResponse,
        *,
        is_probe: bool = False,
    ) -> None:
        """Fills in the holders, and counts the lookup."""
        for match in matches:
            self._add_holder(match, response)
        response.revision = self._registry.layout.revision
        response.is_complete = not self._registry.is_partial(time.monotonic())
        if not is_probe:
            self.latencies.add(time.perf_counter() - begin, bool(response.holders))

    def _add_holder(self, match: Match, response: pb.LookupResponse | internal_pb.LookupResponse) -> None:
        instance = self._registry.instances.find(match.instance_id)
        if instance is None:  # it left after the match was found
            return
        holder = response.holders.add(
            instance_id=match.instance_id,
            epoch=instance.info.epoch,
            peer_address=instance.info.peer_address,
            matched_chunk_count=match.chunk_count,
            matched_token_count=match.token_count,
        )
        for run in match.runs:
            holder.runs.add(
                tier=tier_id(run.tier),
                chunk_count=run.chunk_count,
                token_count=run.token_count,
            )


class LookupService(internal_pb_grpc.LookupServiceServicer):
    """Handlers of one tenant's nodes."""

    def __init__(self, registry: Registry, selector: Selector, lookups: LookupAnswers) -> None:
        self._layout = registry.layout
        self._selector = selector
        self._lookups = lookups

    async def Lookup(self, request: internal_pb.LookupRequest, context: Any) -> internal_pb.LookupResponse:
        return await self._lookup(request, internal_pb.LookupResponse())

    async def LookupStream(
        self, request_iterator: AsyncIterator[internal_pb.LookupStreamRequest], context: Any
    ) -> AsyncIterator[internal_pb.LookupStreamResponse]:
        async for answer in answers(request_iterator, self._lookup, internal_pb.LookupStreamResponse, context):
            yield answer

    async def _lookup(
        self, request: internal_pb.LookupRequest, response: internal_pb.LookupResponse
    ) -> internal_pb.LookupResponse:
        begin = time.perf_counter()
        if request.any_key and (request.chunk_keys or request.prefix_digests):
            return self._answer_any(begin, request, response)
        keys, excluded = request.chunk_keys, request.excluded_instance_id
        selections = self._selector.of_keys(keys, request.fingerprint)
        await self._lookups.answer(begin, selections, response, excluded, is_probe=not keys)
        if request.parent_key and keys:
            self._add_partial_lengths(request, response)
        return response

    def _answer_any(
        self, begin: float, request: internal_pb.LookupRequest, response: internal_pb.LookupResponse
    ) -> internal_pb.LookupResponse:
        """The holders of the first of the keys that an instance holds, or of a chunk that has more of the prompt.

        Raises `BadChunkKey`.
        """
        keys, excluded = check_keys(request.chunk_keys, limit=MAX_ALTERNATIVES), request.excluded_instance_id
        spec = self._selector.find_spec(request.fingerprint)
        part_count = len(spec.parts) if spec else 1
        response.key_index, matches = self._layout.lookup_any(split_keys(keys), part_count, excluded)
        found_count = matches[0].token_count if matches else 0
        for token_count, beginning in self._beginnings(request) if request.prefix_digests else ():
            key = ChunkKey(beginning)
            if token_count > found_count and (longer := self._layout.holders_of_parts(key, part_count, excluded)):
                response.key_index, response.prefix_key, response.prefix_token_count = 0, key, token_count
                matches = longer
                break
        self._lookups.finish(begin, matches, response)
        return response

    def _beginnings(self, request: internal_pb.LookupRequest) -> Iterator[tuple[int, bytes]]:
        """Chunks behind `parent_key` that begin as the prompt does, those with the most tokens in common first."""
        _check_parent(request.parent_key)
        digests = check_prefix_digests(request.prefix_digests, MAX_TOKENS)
        return islice(self._layout.ends.beginning_as(request.parent_key, digests), MAX_BEGINNINGS)

    def _add_partial_lengths(self, request: internal_pb.LookupRequest, response: internal_pb.LookupResponse) -> None:
        """Adds the lengths of the partial chunks behind the longest match. Raises `BadChunkKey`."""
        parent = request.parent_key
        _check_parent(parent)
        if end := max((holder.matched_chunk_count for holder in response.holders), default=0) * KEY_BYTES:
            parent = request.chunk_keys[end - KEY_BYTES : end]
        response.partial_token_counts.extend(self._layout.ends.lengths(parent))


async def answers(
    messages: AsyncIterator[Any],
    look_up: Callable[[Any, Any], Awaitable[Any]],
    kind: type[StreamResponse],
    context: Any,
) -> AsyncIterator[StreamResponse]:
    """The answers of a stream of lookups; `look_up` fills in the response of one, or raises its error."""
    async for message in messages:
        answer, size_bytes, delay_seconds = kind(), 0, 0.0
        for request in message.requests:
            if size_bytes > ANSWER_BYTES or len(answer.results) == MAX_ANSWERS:
                yield answer
                answer, size_bytes = kind(), 0
            result = answer.results.add()
            try:
                count_request()
                await look_up(request, result.response)
            except LmkvError as error:
                result.error.CopyFrom(rpc.to_status(error))
                delay_seconds = max(delay_seconds, error.delay_seconds)
            size_bytes += result.ByteSize()
        if delay_seconds:
            await delay_refusal(delay_seconds, context)
        yield answer


def longest_first(matches: Iterable[Match]) -> list[Match]:
    """The longest match of each instance, longest first, then by instance id."""
    ranked = sorted(matches, key=lambda match: (-match.token_count, match.instance_id))
    best: dict[str, Match] = {}
    for match in ranked:
        best.setdefault(match.instance_id, match)
    return list(best.values())


def _check_parent(parent: bytes) -> None:
    if len(parent) != KEY_BYTES:
        raise BadChunkKey(f"parent_key has {len(parent)} bytes, not {KEY_BYTES}", field="parent_key")
