"""CacheService: lookups, watches, moves, clears, drains and pins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from google.longrunning import operations_pb2
from numpy.typing import NDArray

from lmkv import rpc
from lmkv.auth.caller import count_request
from lmkv.auth.identity import client_identity
from lmkv.errors import BadChunkKey, LmkvError
from lmkv.keys import KEY_BYTES, check_keys, check_prefix_digests
from lmkv.rpc.hint_messages import OUTCOMES_BY_NUMBER
from lmkv.rpc.refusal_delay import delay_refusal
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import cache_service_pb2_grpc as pb_grpc
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.latency_histogram import LatencyHistogram
from lmkv_server.coordinator.core.layout_map import MAX_TOKENS, Match
from lmkv_server.coordinator.core.tail_match import MAX_BEGINNINGS, with_tails
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.drains import Drains
from lmkv_server.coordinator.operations.explanations import Explanations
from lmkv_server.coordinator.operations.hints import FleetHints
from lmkv_server.coordinator.operations.moves import Moves
from lmkv_server.coordinator.operations.operation_proto import to_proto
from lmkv_server.coordinator.operations.pins import FleetPins
from lmkv_server.coordinator.registry.part_lookup import PartLookup
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import SHORT_KEYS, SelectedChunks, Selector
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.pages import page_limit, page_token, read_page_token

ANSWER_BYTES = rpc.MAX_MESSAGE_BYTES // 2
"""Size of the answers that share a message on a stream: half of the message limit."""
MAX_ANSWERS = 64
"""Answers per message: about a millisecond of work. Sending it lets other tasks run."""
MAX_ALTERNATIVES = 1024
"""Most keys of a lookup with `any_key`: about a millisecond of work."""


class CacheService(pb_grpc.CacheServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns what they use."""

    def __init__(
        self,
        registry: Registry,
        selector: Selector,
        moves: Moves,
        clears: Clears,
        drains: Drains,
        pins: FleetPins,
        hints: FleetHints,
        explanations: Explanations,
        watch: LayoutWatch,
    ) -> None:
        self._registry = registry
        self._selector = selector
        self._moves = moves
        self._clears = clears
        self._drains = drains
        self._pins = pins
        self._hints = hints
        self._explanations = explanations
        self._watch = watch
        self._part_lookup = PartLookup(registry.layout, selector)
        self.lookups = LatencyHistogram()
        """Lookups that were answered; a hit found at least one holder."""

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, pb.LookupResponse())

    async def LookupStream(
        self, request_iterator: AsyncIterator[pb.LookupStreamRequest], context: Any
    ) -> AsyncIterator[pb.LookupStreamResponse]:
        async for message in request_iterator:
            answer, size_bytes, delay_seconds = pb.LookupStreamResponse(), 0, 0.0
            for request in message.requests:
                if size_bytes > ANSWER_BYTES or len(answer.results) == MAX_ANSWERS:
                    yield answer
                    answer, size_bytes = pb.LookupStreamResponse(), 0
                result = answer.results.add()
                try:
                    count_request()
                    await self._lookup(request, result.response)
                except LmkvError as error:
                    result.error.CopyFrom(rpc.to_status(error))
                    delay_seconds = max(delay_seconds, error.delay_seconds)
                size_bytes += result.ByteSize()
            if delay_seconds:
                await delay_refusal(delay_seconds, context)
            yield answer

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        return await self._explanations.explain(request)

    async def Move(self, request: pb.MoveRequest, context: Any) -> operations_pb2.Operation:
        with audited("copy" if request.copy else "move", request) as entry:
            operation = await self._moves.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> operations_pb2.Operation:
        with audited("clear", request) as entry:
            operation = await self._clears.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> operations_pb2.Operation:
        with audited("drain", request) as entry:
            operation = self._drains.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        with audited("pin", request) as entry:
            pin = await self._pins.pin(request)
            entry.names["pin"] = pin.pin_id
        return pb.PinResponse(pin=pin)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        with audited("unpin", request):
            await self._pins.unpin(request.pin_id)
        return pb.UnpinResponse()

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        with audited("hint", request) as entry:
            response = await self._hints.hint(request)
            entry.names["result"] = OUTCOMES_BY_NUMBER.get(response.result.outcome, "unknown")
        return response

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        last = read_page_token("ListPins", request.page_token)
        rest = [pin for pin in self._pins.in_force(request.instance_id) if pin.pin_id > last]
        page = rest[: page_limit(request.page_size)]
        more = len(page) < len(rest)
        return pb.ListPinsResponse(pins=page, next_page_token=page_token("ListPins", page[-1].pin_id) if more else "")

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        async for response in self._watch.watch(request.start_revision, request.fingerprint, client_identity(context)):
            yield response

    async def lookup_tokens(
        self, tokens: NDArray[np.integer], *, model_name: str = "", cache_salt: str = "", lora_name: str = ""
    ) -> pb.LookupResponse:
        """As `Lookup`, with the tokens as an array. Raises the errors of `Lookup`."""
        begin = time.perf_counter()
        selections = await self._selector.of_tokens(tokens, model_name, cache_salt, lora_name, held_only=True)
        return await self._answer(begin, selections, pb.LookupResponse(), names_chunks=tokens.size > 0)

    async def _lookup(self, request: pb.LookupRequest, response: pb.LookupResponse) -> pb.LookupResponse:
        begin = time.perf_counter()
        if request.any_key and (request.chunk_keys or request.prefix_digests) and not request.tokens:
            return self._answer_any(begin, request, response)
        selections = await self._selector.select(request, request.fingerprint, held_only=True)
        names_chunks = bool(request.tokens or request.chunk_keys)
        await self._answer(begin, selections, response, request.excluded_instance_id, names_chunks=names_chunks)
        if request.parent_key and request.chunk_keys:
            self._add_partial_lengths(request, response)
        return response

    async def _answer(
        self,
        begin: float,
        selections: Sequence[SelectedChunks],
        response: pb.LookupResponse,
        excluded: str = "",
        *,
        names_chunks: bool,
    ) -> pb.LookupResponse:
        """Fills in `response` and returns it: adding a finished message to another one would copy it."""
        layout = self._registry.layout
        found: list[list[Match]] = []
        read_count = 0
        for selection in selections:
            if selection.parted_spec is None:
                matches = layout.lookup(selection.keys, excluded)
                if selection.tail:
                    matches = with_tails(layout, selection.tail, selection.keys, matches, excluded)
                    matches.sort(key=lambda match: (-match.token_count, match.instance_id))
                found.append(matches)
            else:
                matches = await self._part_lookup.lookup(selection.parted_spec, selection.keys, excluded)
                found.append(longest_first(matches))
            read_count += len(selection)
            if read_count > SHORT_KEYS:
                read_count = 0
                await asyncio.sleep(0)
        matches = found[0] if len(found) == 1 else longest_first(match for part in found for match in part)
        self._finish(begin, matches, response, names_chunks=names_chunks)
        return response

    def _answer_any(self, begin: float, request: pb.LookupRequest, response: pb.LookupResponse) -> pb.LookupResponse:
        """The holders of the first of the keys that an instance holds, or of a chunk that has more of the prompt.

        Raises `BadChunkKey`.
        """
        keys = check_keys(request.chunk_keys, limit=MAX_ALTERNATIVES)
        layout, excluded = self._registry.layout, request.excluded_instance_id
        response.key_index, matches = layout.lookup_any(keys, excluded)
        found_count = matches[0].token_count if matches else 0
        for token_count, key in self._beginnings(request) if request.prefix_digests else ():
            if token_count > found_count and (longer := layout.lookup(key, excluded)):
                response.key_index, response.prefix_key, response.prefix_token_count = 0, key, token_count
                matches = longer
                break
        self._finish(begin, matches, response, names_chunks=True)
        return response

    def _beginnings(self, request: pb.LookupRequest) -> Iterator[tuple[int, bytes]]:
        """Chunks behind `parent_key` that begin as the prompt does, those with the most tokens in common first."""
        self._check_parent(request.parent_key)
        digests = check_prefix_digests(request.prefix_digests, MAX_TOKENS)
        return islice(self._registry.layout.beginning_as(request.parent_key, digests), MAX_BEGINNINGS)

    def _check_parent(self, parent: bytes) -> None:
        if len(parent) != KEY_BYTES:
            raise BadChunkKey(f"parent_key has {len(parent)} bytes, not {KEY_BYTES}", field="parent_key")

    def _add_partial_lengths(self, request: pb.LookupRequest, response: pb.LookupResponse) -> None:
        """Adds the lengths of the partial chunks behind the longest match. Raises `BadChunkKey`."""
        parent = request.parent_key
        self._check_parent(parent)
        if end := max((holder.matched_chunk_count for holder in response.holders), default=0) * KEY_BYTES:
            parent = request.chunk_keys[end - KEY_BYTES : end]
        response.partial_token_counts.extend(self._registry.layout.partial_lengths(parent))

    def _finish(
        self, begin: float, matches: Iterable[Match], response: pb.LookupResponse, *, names_chunks: bool
    ) -> None:
        """Fills in a response."""
        layout = self._registry.layout
        for match in matches:
            self._add_holder(match, response)
        response.revision = layout.revision
        response.partial = self._registry.is_partial(time.monotonic())
        if names_chunks:  # a request that names nothing is a health probe
            self.lookups.add(time.perf_counter() - begin, bool(response.holders))

    def _add_holder(self, match: Match, response: pb.LookupResponse) -> None:
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
                tier=chunk_pb2.Tier.ValueType(run.tier),
                chunk_count=run.chunk_count,
                token_count=run.token_count,
            )


def longest_first(matches: Iterable[Match]) -> list[Match]:
    """The longest match of each instance, longest first, then by instance id."""
    ranked = sorted(matches, key=lambda match: (-match.token_count, match.instance_id))
    best: dict[str, Match] = {}
    for match in ranked:
        best.setdefault(match.instance_id, match)
    return list(best.values())
