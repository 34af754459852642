"""Asks instances where a prompt is, and why parts of it are not there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from weakref import WeakValueDictionary

from lmkv import rpc
from lmkv.errors import BadSelection, Full, InstanceNotFound, LmkvError
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES
from lmkv.runtime.turns import Slots
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_server.coordinator.core.instance_info import InstanceInfo
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector

TIMEOUT_SECONDS = 3.0
"""Timeout of one instance, which asks its tiers."""
MAX_KEYS = 32_768
"""Chunks of one prompt: half a message of keys."""
MAX_ASKED = 64
"""Orders of one call that run at a time."""
MAX_ASKED_OF_INSTANCE = 2
"""Prompts that one instance explains at a time for this coordinator, callers in turn: half of what it accepts."""
ANY_TIER = 0
ANSWER_BYTES = rpc.MAX_MESSAGE_BYTES // 2
"""Size of the explanations in one answer."""


class Explanations:
    """Answers `CacheService.Explain`."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders) -> None:
        self._registry = registry
        self._selector = selector
        self._orders = orders
        self._slots: WeakValueDictionary[str, Slots] = WeakValueDictionary()
        """By instance."""

    async def explain(self, request: pb.ExplainRequest, caller: str) -> pb.ExplainResponse:
        """Asks each instance that serves a spec of the prompt, callers in turn.

        Raises the errors of `CacheService.Explain`.
        """
        instances = self._instances(request.instance_id)
        if request.engine_request_id:
            wanted = [
                (one.instance_id, report_pb.ExplainOrder(engine_request_id=request.engine_request_id))
                for one in instances
            ]
        else:
            wanted = await self._prompt_orders(request, instances)
        slots = asyncio.Semaphore(MAX_ASKED)
        asked = (self._ask(instance_id, order, slots, caller) for instance_id, order in wanted)
        response, size_bytes = pb.ExplainResponse(), 0
        for found in await asyncio.gather(*asked):
            _clip(found, len(request.prompt.tokens.token_ids))
            size_bytes += found.ByteSize()
            if size_bytes > ANSWER_BYTES:
                found.ClearField("explanation")
                found.error.CopyFrom(rpc.to_status(Full("the answer is too large: name one instance")))
            response.explanations.append(found)
        return response

    def _instances(self, instance_id: str) -> Sequence[InstanceInfo]:
        found = [one.info for one in self._registry.instances if instance_id in ("", one.info.instance_id)]
        if instance_id and not found:
            raise InstanceNotFound(f"instance {instance_id!r} is not registered", instance_id=instance_id)
        return sorted(found, key=lambda info: info.instance_id)

    async def _prompt_orders(
        self, request: pb.ExplainRequest, instances: Sequence[InstanceInfo]
    ) -> list[tuple[str, report_pb.ExplainOrder]]:
        """One order per instance and spec; keys without a known spec are asked for under each spec of an instance."""
        selections = await self._selector.required(request.prompt)
        if any(len(chosen) > MAX_KEYS for chosen in selections):
            raise BadSelection(f"at most {MAX_KEYS} chunks of a prompt can be explained")
        return [
            (info.instance_id, report_pb.ExplainOrder(fingerprint=spec.fingerprint, chunk_keys=chosen.keys))
            for info in instances
            for chosen in (one.held_at(self._registry.layout, info.instance_id, ANY_TIER) for one in selections)
            for spec in info.specs
            if chosen.fingerprint in (b"", spec.fingerprint) and len(chosen.keys) >= KEY_BYTES
        ]

    async def _ask(
        self, instance_id: str, order: report_pb.ExplainOrder, slots: asyncio.Semaphore, caller: str
    ) -> pb.InstanceExplanation:
        found = pb.InstanceExplanation(instance_id=instance_id, fingerprint=order.fingerprint)
        of_instance = self._slots.setdefault(instance_id, Slots(MAX_ASKED_OF_INSTANCE))
        try:
            async with slots, of_instance.take(caller):
                outcome = await self._orders.execute(instance_id, report_pb.Order(explain=order), TIMEOUT_SECONDS)
        except LmkvError as error:
            found.error.CopyFrom(rpc.to_status(error))
            return found
        if outcome.status.code:
            found.error.CopyFrom(outcome.status)
        else:
            found.explanation.CopyFrom(outcome.explanation)
        return found


def _clip(found: pb.InstanceExplanation, token_count: int) -> None:
    """Counts the tokens of the last chunk as they are: instances count every chunk as a full one."""
    position = 0
    for span in found.explanation.spans if token_count else ():
        span.token_count = max(0, min(span.token_count, token_count - position))
        position += span.token_count
