"""CacheService: lookups, watches, moves, clears, drains and pins."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from google.longrunning import operations_pb2
from numpy.typing import NDArray

from lmkv.auth.caller import client_identity
from lmkv.rpc.hint_messages import OUTCOMES_BY_NUMBER
from lmkv.rpc.prompts import names_chunks
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import cache_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.operations.audit import audited
from lmkv_server.coordinator.operations.build import FleetOperations
from lmkv_server.coordinator.operations.operation import to_proto
from lmkv_server.coordinator.registry.selection import Selector
from lmkv_server.coordinator.services.layout_watch import LayoutWatch
from lmkv_server.coordinator.services.lookups import LookupAnswers, answers
from lmkv_server.coordinator.services.pages import page_limit, page_token, read_page_token


class CacheService(pb_grpc.CacheServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns what they use."""

    def __init__(
        self,
        selector: Selector,
        lookups: LookupAnswers,
        operations: FleetOperations,
        watch: LayoutWatch,
    ) -> None:
        self._selector = selector
        self._lookups = lookups
        self._operations = operations
        self._watch = watch

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        return await self._lookup(request, pb.LookupResponse())

    async def LookupStream(
        self, request_iterator: AsyncIterator[pb.LookupStreamRequest], context: Any
    ) -> AsyncIterator[pb.LookupStreamResponse]:
        async for answer in answers(request_iterator, self._lookup, pb.LookupStreamResponse, context):
            yield answer

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        return await self._operations.explanations.explain(request, client_identity(context))

    async def Move(self, request: pb.MoveRequest, context: Any) -> operations_pb2.Operation:
        with audited("copy" if request.copy else "move", request) as entry:
            operation = await self._operations.moves.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Clear(self, request: pb.ClearRequest, context: Any) -> operations_pb2.Operation:
        with audited("clear", request) as entry:
            operation = await self._operations.clears.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> operations_pb2.Operation:
        with audited("drain", request) as entry:
            operation = self._operations.drains.start(request)
            entry.names["operation"] = operation.name
        return to_proto(operation)

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        with audited("pin", request) as entry:
            pin = await self._operations.pins.pin(request)
            entry.names["pin"] = pin.pin_id
        return pb.PinResponse(pin=pin)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        with audited("unpin", request):
            await self._operations.pins.unpin(request.pin_id)
        return pb.UnpinResponse()

    async def Hint(self, request: pb.HintRequest, context: Any) -> pb.HintResponse:
        with audited("hint", request) as entry:
            response = await self._operations.hints.hint(request)
            entry.names["result"] = OUTCOMES_BY_NUMBER.get(response.result.outcome, "unknown")
        return response

    async def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        last = read_page_token("ListPins", request.page_token)
        rest = [pin for pin in self._operations.pins.in_force(request.instance_id) if pin.pin_id > last]
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
        response = pb.LookupResponse()
        await self._lookups.answer(begin, selections, response, is_probe=not tokens.size)
        return response

    async def _lookup(self, request: pb.LookupRequest, response: pb.LookupResponse) -> pb.LookupResponse:
        begin = time.perf_counter()
        selections = await self._selector.select(request.prompt, held_only=True)
        await self._lookups.answer(
            begin, selections, response, request.excluded_instance_id, is_probe=not names_chunks(request.prompt)
        )
        return response
