"""Asks one instance about a prompt: where it is and why parts of it are not there, or to treat it as a hint says."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from hashlib import sha256
from weakref import WeakValueDictionary

from lmkv import rpc
from lmkv.auth.caller import Caller, current_caller
from lmkv.errors import BadSelection, Full, InstanceNotFound, LmkvError
from lmkv.hints import DEFAULT_PRIORITY, DEFAULT_TTL_SECONDS, MAX_PRIORITY, HintAction
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES
from lmkv.rpc.messages import ACTIONS_BY_NUMBER, MAX_HINT_KEYS
from lmkv.runtime.turns import Slots
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.layout_map import tier_number
from lmkv_server.coordinator.core.match import keys_with_tail
from lmkv_server.coordinator.core.models import InstanceInfo
from lmkv_server.coordinator.operations.moves import check_spec
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import SelectedChunks, Selector

EXPLAIN_SECONDS = 3.0
"""Timeout of one instance, which asks its tiers."""
MAX_KEYS = 32_768
"""Chunks of one prompt: half a message of keys."""
MAX_ASKED = 64
"""Orders of one call that run at a time."""
MAX_ASKED_OF_INSTANCE = 2
"""Prompts that one instance explains at a time for this coordinator, callers in turn: half of what it explains."""
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
        """Places of the callers at each instance."""

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
                outcome = await self._orders.execute(instance_id, report_pb.Order(explain=order), EXPLAIN_SECONDS)
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


HINT_SECONDS = 5.0
"""Timeout for an instance to answer: a prefetch asks its tiers what they hold."""
_NAMESPACE = uuid.UUID("6c6d6b76-0000-4000-8000-000000000002")


class FleetHints:
    """Sends hints to instances, and returns how they ended."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders) -> None:
        self._registry = registry
        self._selector = selector
        self._orders = orders

    async def hint(self, request: pb.HintRequest) -> pb.HintResponse:
        """Has the instance carry out a hint. Raises the errors of `CacheService.Hint`."""
        action = ACTIONS_BY_NUMBER.get(request.action)
        if action is None:
            raise BadSelection(f"action {request.action} is unknown; set one of HintAction", field="action")
        ttl_nanoseconds, priority = _ttl_nanoseconds(request), _priority(request, action)
        instance = self._registry.instances.named(request.instance_id, "instance_id")
        chosen = self._choose(await self._selector.required(request.prompt), instance, action)
        check_spec(instance, chosen)
        if len(chosen) > MAX_HINT_KEYS:
            raise BadSelection(f"{len(chosen)} chunks are named; a hint covers at most {MAX_HINT_KEYS}")
        if not chosen.fingerprint:  # no instance holds a chunk of these keys, so their spec is not known
            return pb.HintResponse(result=chunk_pb2.HintResult(outcome=chunk_pb2.HINT_OUTCOME_MISSING))
        order = report_pb.HintOrder(
            hint_id=_hint_id(request.request_id),
            action=request.action,
            fingerprint=chosen.fingerprint,
            chunk_keys=self._keys(chosen, request.instance_id, action),
            priority=priority,
            owner=_owner(current_caller()),
        )
        if action in (HintAction.PIN, HintAction.RETAIN):
            order.ttl.FromNanoseconds(ttl_nanoseconds)
        outcome = await self._orders.execute(request.instance_id, report_pb.Order(hint=order), HINT_SECONDS)
        if outcome.status.code:
            raise rpc.from_status(outcome.status)
        is_pinned = action is HintAction.PIN and outcome.hint.chunk_count > 0
        return pb.HintResponse(
            result=outcome.hint, pin_id=f"{request.instance_id}/{order.hint_id}" if is_pinned else ""
        )

    def _choose(self, selections: Sequence[SelectedChunks], instance: Instance, action: HintAction) -> SelectedChunks:
        """Chooses among the specs of a model name: the spec, served by the instance, of which it holds most.

        If it brings chunks, it is the spec of which any instance holds most.
        """
        layout, instance_id = self._registry.layout, instance.info.instance_id
        fingerprints = {spec.fingerprint for spec in instance.info.specs}
        served = [one for one in selections if one.fingerprint in fingerprints] or selections
        if action.brings_chunks:
            return max(served, key=lambda one: max((match.chunk_count for match in layout.lookup(one.keys)), default=0))
        return max(served, key=lambda one: one.match_at(layout, instance_id, tier_number(HOST)))

    def _keys(self, chosen: SelectedChunks, instance_id: str, action: HintAction) -> bytes:
        """The chosen keys; of tokens, the end is what the instance holds of it, or any if the hint brings chunks."""
        if chosen.prompt is None:
            return chosen.keys
        holder = "" if action.brings_chunks else instance_id
        return keys_with_tail(self._registry.layout, chosen.prompt, holder)


def _ttl_nanoseconds(request: pb.HintRequest) -> int:
    if not request.HasField("ttl"):
        return round(DEFAULT_TTL_SECONDS * 1e9)
    nanoseconds = request.ttl.ToNanoseconds()
    if nanoseconds <= 0:
        raise BadSelection(f"ttl {request.ttl.ToJsonString()} is not positive", field="ttl")
    return nanoseconds


def _priority(request: pb.HintRequest, action: HintAction) -> int:
    if action is not HintAction.RETAIN:
        return 0
    if not 0 <= request.priority <= MAX_PRIORITY:
        raise BadSelection(f"priority {request.priority} is not from 1 to {MAX_PRIORITY}", field="priority")
    return request.priority or DEFAULT_PRIORITY


def _hint_id(request_id: str) -> str:
    return (uuid.uuid5(_NAMESPACE, request_id) if request_id else uuid.uuid4()).hex[:16]


def _owner(caller: Caller) -> bytes:
    """Returns the owner of the quota that a hint takes: the caller's name in its tenant."""
    return sha256(f"{caller.tenant}\0{caller.name}".encode()).digest()[:KEY_BYTES]
