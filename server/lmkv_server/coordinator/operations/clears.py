"""Clears: instances drop chunks, independently of each other."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from lmkv import rpc
from lmkv.errors import BadSelection, LmkvError, OperationCancelled
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES, split_keys
from lmkv.rpc.messages import names_chunks
from lmkv.spec import KvSpec
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1.prompt_pb2 import KeyPrompt, PromptSelector
from lmkv_server.coordinator.operations.operations import Operation, Operations, add_failure
from lmkv_server.coordinator.operations.orders import PendingOrders, check_tier
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.selection import Selector

MAX_SHOWN = 256
"""Characters of names in an error."""
BATCH_CHUNKS = 16_384
"""Chunks per order."""
SETTLE_SECONDS = 10.0
"""Longest time that a clear of all instances waits for instances that have not registered yet."""
POLL_SECONDS = 0.05
"""Time between two looks for such instances."""
TIMEOUT_SECONDS = 60.0
"""Timeout of a clear; instances that have not answered by then count as failed."""


class _Drop(NamedTuple):
    """The chunks that each instance is to drop."""

    order: report_pb.DropOrder
    has_tokens: bool = True
    """Whether the tokens of these chunks count: those of a prompt count with part 0."""


class Clears:
    """Starts clears."""

    def __init__(self, registry: Registry, selector: Selector, orders: PendingOrders, operations: Operations) -> None:
        self._registry = registry
        self._selector = selector
        self._orders = orders
        self._operations = operations

    async def start_wrong(self, packed_keys: bytes) -> Operation:
        """Starts to clear chunks that are wrong, pinned or not, and all behind them. Raises as `start`."""
        keys = KeyPrompt(chunk_keys=split_keys(packed_keys, limit=BATCH_CHUNKS))
        return await self.start(pb.ClearRequest(prompt=PromptSelector(keys=keys)), wrong=True)

    async def start(self, request: pb.ClearRequest, *, wrong: bool = False) -> Operation:
        """Starts a clear; of chunks that are `wrong`, also of pinned ones and of those behind them.

        Raises the errors of `CacheService.Clear`.
        """
        if known := self._operations.repeated(request):
            return known
        if request.tier:
            check_tier(self._registry.instances, request.tier, "tier")
        drops = await self._drops(request)
        for drop in drops:
            drop.order.wrong = wrong
        if known := self._operations.repeated(request):  # started meanwhile
            return known
        instance_ids = self._instance_ids(request)
        progress = pb.ClearProgress(instance_id=request.instance_id, tier=request.tier, dry_run=request.dry_run)
        progress.create_time.GetCurrentTime()
        clear = _Clear(self._registry, self._orders, instance_ids, drops, progress)
        return self._operations.start(request, clear, TIMEOUT_SECONDS)

    def _instance_ids(self, request: pb.ClearRequest) -> list[str]:
        if not request.instance_id:
            return [instance.info.instance_id for instance in self._registry.instances]
        return [self._registry.instances.named(request.instance_id, "instance_id").info.instance_id]

    async def _drops(self, request: pb.ClearRequest) -> list[_Drop]:
        """The orders for each instance."""
        common = report_pb.DropOrder(tier=request.tier, dry_run=request.dry_run)
        drops = []
        names_prompt = names_chunks(request.prompt)
        if (request.weight_version or request.kept_weight_version) and not request.model_name:
            raise BadSelection("a version of the weights is selected with a model: set model_name")
        if names_prompt + bool(request.model_name) + request.all > 1:
            raise BadSelection(
                "prompt, model_name and all exclude each other; the model of a prompt is prompt.tokens.model_name"
            )
        if names_prompt:
            drops = await self._drops_of_prompt(request.prompt)
        elif request.model_name:
            drops = [_Drop(report_pb.DropOrder(fingerprint=spec.fingerprint)) for spec in self._specs(request)]
        elif request.all:
            drops = [_Drop(report_pb.DropOrder(all=True))]
        else:
            raise BadSelection("nothing is selected: set prompt or model_name, or all to clear all")
        for drop in drops:
            drop.order.MergeFrom(common)
        return drops

    def _specs(self, request: pb.ClearRequest) -> list[KvSpec]:
        """The specs of the model, of the versions of its weights that are selected."""
        specs = self._registry.instances.models.specs(request.model_name)
        version, kept = request.weight_version, request.kept_weight_version
        if not (version or kept):
            return specs
        if version and kept:
            raise BadSelection("weight_version and kept_weight_version exclude each other")
        known = sorted({spec.weight_version for spec in specs} - {""})
        if (version or kept) not in known:
            raise BadSelection(
                f"no engine has registered version {(version or kept)[:MAX_SHOWN]!r} of {request.model_name!r}; "
                f"registered are: {', '.join(known)[:MAX_SHOWN] or 'none'}",
                weight_version=version or kept,
            )
        return [spec for spec in specs if (spec.weight_version == version if version else spec.weight_version != kept)]

    async def _drops_of_prompt(self, prompt: PromptSelector) -> list[_Drop]:
        """The orders for chunks that are named, with all their parts.

        Keys may be of any registered spec. Chunks that begin with a prompt's last tokens are those that are held now.
        """
        if prompt.HasField("keys") and not prompt.keys.fingerprint:
            (named,) = await self._selector.select(prompt)
            part_count = self._registry.instances.models.max_part_count()
            columns = [await self._selector.keys_by_part(named.keys, part_count)]
        else:
            selections = await self._selector.required(prompt)
            layout = self._registry.layout
            columns = [one.columns(layout) for one in selections]
        return [
            _Drop(report_pb.DropOrder(chunk_keys=keys[start : start + BATCH_CHUNKS * KEY_BYTES]), has_tokens=part == 0)
            for column in columns
            for part, keys in enumerate(column)
            for start in range(0, len(keys), BATCH_CHUNKS * KEY_BYTES)
        ]


class _Clear:
    """A running clear."""

    def __init__(
        self,
        registry: Registry,
        orders: PendingOrders,
        instance_ids: list[str],
        drops: list[_Drop],
        progress: pb.ClearProgress,
    ) -> None:
        self._registry = registry
        self._orders = orders
        self._instance_ids = instance_ids
        self._drops = drops
        self._deadline = time.monotonic() + TIMEOUT_SECONDS
        self._result = pb.ClearResult()
        self.progress = progress
        self.progress.instance_count = len(instance_ids)
        self.size_bytes = sum(len(drop.order.chunk_keys) for drop in drops)

    async def run(self, operation: Operation) -> pb.ClearResult:
        """Runs it to its end. Raises the error if no instance did anything, or `OperationCancelled`."""
        async with asyncio.TaskGroup() as group:
            for instance_id in self._instance_ids:
                group.create_task(self._clear(instance_id, operation))
            if not self.progress.instance_id:
                await self._clear_new(group, operation)
        if operation.cancelled.is_set():
            raise OperationCancelled(f"cancelled after {self._result.chunk_count} chunks; these are dropped")
        failed = [failure for failure in self._result.failures if not failure.failures[0].chunk_keys]
        if failed and len(failed) == len(self._instance_ids):
            raise rpc.from_status(failed[0].failures[0].status)
        return self._result

    async def _clear_new(self, group: asyncio.TaskGroup, operation: Operation) -> None:
        """Clears instances that register meanwhile, for at most `SETTLE_SECONDS`.

        A coordinator that has just restarted does not know all yet.
        """
        until = time.monotonic() + SETTLE_SECONDS
        while self._registry.is_partial(time.monotonic()) and time.monotonic() < until:
            if operation.cancelled.is_set():
                return
            known = set(self._instance_ids)
            for instance in self._registry.instances:
                if instance.info.instance_id not in known:
                    self._instance_ids.append(instance.info.instance_id)
                    self.progress.instance_count += 1
                    group.create_task(self._clear(instance.info.instance_id, operation))
            await asyncio.sleep(POLL_SECONDS)

    async def _clear(self, instance_id: str, operation: Operation) -> None:
        failure = pb.ClearFailure(instance_id=instance_id)
        for drop in self._drops:
            try:
                order = report_pb.Order(drop=drop.order, operation_name=operation.name)
                outcome = await self._orders.execute(
                    instance_id, order, self._deadline - time.monotonic(), operation.cancelled
                )
            except LmkvError as error:
                failure.failures.add(status=rpc.to_status(error))
                break
            self._add_outcome(outcome, failure)
            if drop.has_tokens:
                self._result.token_count += outcome.token_count
        if failure.failures:
            self._result.failures.append(failure)
        self.progress.done_instance_count += 1

    def _add_outcome(self, outcome: report_pb.OrderOutcome, failure: pb.ClearFailure) -> None:
        self._result.chunk_count += outcome.chunk_count
        self._result.pinned_chunk_count += outcome.pinned_chunk_count
        for part in outcome.failures:
            add_failure(failure.failures, part.chunk_keys, part.status)
        if outcome.status.code and not outcome.failures:
            failure.failures.add(status=outcome.status)
