"""Drains: chunks that only one instance holds are copied to other instances, so that it can be stopped.

A drain reads the layout map in passes. In a pass, destinations fetch what no other instance holds, batch by
batch; the next pass finds what was stored, or lost elsewhere, meanwhile. The last pass finds nothing
or copies nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from lmkv import rpc
from lmkv.errors import (
    BadSelection,
    ChunkNotFound,
    InstanceNotFound,
    KvSpecMismatch,
    LmkvError,
    NoFreeExtents,
    OperationCancelled,
    Unreachable,
)
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES, join_keys
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.operations.moves import check_p2p, spec_message
from lmkv_server.coordinator.operations.operations import LONGEST_SECONDS, Operation, Operations
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.registry.registry import Registry

MAX_DESTINATIONS = 64
MAX_PASSES = 10
SCAN_KEYS = 4096
"""Pairs of chunk and holder that are read before other tasks run: about a millisecond."""
BATCH_CHUNKS = 1024
BATCH_BYTES = 256 << 20
"""Chunks of one order, and about how many bytes they have."""
ORDER_SECONDS = 60.0
"""Timeout of one order: a destination that takes longer receives nothing more in this pass."""
REPORT_SECONDS = 0.2
"""Time between passes: with a shared layout map, what an instance has gained is known here a little later."""
SYNC_SECONDS = 10.0
"""Longest time that a drain waits until the instance has reported what it holds."""
CONFIRM_SECONDS = 10.0
"""Longest time that a drain waits until all other instances have reported once more."""
SETTLE_SECONDS = 10.0
"""Longest time that a drain that copies nothing waits for instances that have not registered yet."""
ANNOUNCE_SECONDS = 5.0
"""Timeout for the instance to report that it is going to stop, which only needs its memory."""
LEAVING_SECONDS = 600.0
"""An instance is expected to stop within this time after its drain has ended."""

DrainFailures = RepeatedCompositeFieldContainer[pb.DrainFailure]


class Drains:
    """Starts drains."""

    def __init__(self, registry: Registry, orders: PendingOrders, operations: Operations) -> None:
        self._registry = registry
        self._orders = orders
        self._operations = operations

    def start(self, request: pb.DrainRequest) -> Operation:
        """Starts a drain. Raises the errors of `CacheService.Drain`."""
        if known := self._operations.repeated(request):
            return known
        seconds = _timeout_seconds(request)
        drain = _Drain(self._registry, self._orders, request, seconds)
        drain.check()
        drain.expect_stop()
        return self._operations.start(request, drain, seconds)


class _Drain:
    """A running drain."""

    size_bytes = BATCH_CHUNKS * KEY_BYTES
    """Size of the keys of its orders."""

    def __init__(
        self,
        registry: Registry,
        orders: PendingOrders,
        request: pb.DrainRequest,
        seconds: float,
    ) -> None:
        self._registry = registry
        self._layout = registry.layout
        self._instances = registry.instances
        self._orders = orders
        self._request = request
        self._source = self._instances.named(request.instance_id, "instance_id")
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._settle_until = time.monotonic() + SETTLE_SECONDS
        self._result = pb.DrainResult()
        self._failures: dict[str, pb.DrainFailure] = {}
        """Chunks that this pass did not copy, by reason."""
        self._refusals: dict[tuple[str, bytes], LmkvError] = {}
        """Destinations that take no more chunks of a spec in this pass, and why."""
        self.progress = pb.DrainProgress(instance_id=request.instance_id, epoch=self._source.info.epoch)
        self.progress.create_time.GetCurrentTime()
        self.progress.expire_time.FromNanoseconds(time.time_ns() + round(seconds * 1e9))

    @property
    def _instance_id(self) -> str:
        return self._request.instance_id

    def check(self) -> None:
        """Raises the errors of `CacheService.Drain`."""
        check_p2p(self._source, "instance_id")
        named = self._request.destination_instance_ids
        if len(named) > MAX_DESTINATIONS:
            raise BadSelection(
                f"destination_instance_ids: {len(named)} are named; at most {MAX_DESTINATIONS} are allowed"
            )
        leaving = self._leaving()
        for instance_id in named:
            check_p2p(self._instances.named(instance_id, "destination_instance_ids"), "destination_instance_ids")
            if instance_id == self._instance_id:
                raise BadSelection(f"destination_instance_ids: {instance_id!r} is the instance that is drained")
            if instance_id in leaving:
                raise BadSelection(
                    f"destination_instance_ids: {instance_id!r} is being drained itself, or was just now"
                )

    def destinations(self, fingerprint: bytes | None = None) -> list[Instance]:
        """Instances that may receive chunks, of one spec or of any, the preferred ones first."""
        leaving = self._leaving()
        if named := self._request.destination_instance_ids:
            found = [one for name in dict.fromkeys(named) if (one := self._instances.find(name))]
        else:
            found = sorted(self._instances, key=lambda one: (one.is_standby, -_free_bytes(one)))
        return [
            one
            for one in found
            if one.info.instance_id not in {self._instance_id, *leaving}
            and one.info.peer_address
            and (fingerprint is None or one.accepts(fingerprint))
        ]

    async def run(self, operation: Operation) -> pb.DrainResult:
        """Runs it to its end. Raises the error if it copied nothing though chunks remain, `InstanceNotFound` if the
        instance leaves, or `OperationCancelled`."""
        try:
            await self._wait_synced()
            await self._announce(operation.name, self._seconds + LEAVING_SECONDS)
            remaining = await self._copy_all(operation)
        except LmkvError:
            await self._announce_end(operation)
            raise
        await self._announce_end(operation)
        return self._conclude(remaining, operation)

    async def _copy_all(self, operation: Operation) -> int:
        """Copies what only the instance holds in passes; returns how many chunks remain."""
        remaining = await self._count_confirmed(operation)
        while remaining and self.progress.pass_count < MAX_PASSES and not self._is_over(operation):
            self.progress.pass_count += 1
            self.progress.chunk_count = self.progress.done_chunk_count + remaining
            before = self._result.chunk_count
            await self._copy_sole(operation)
            await asyncio.sleep(REPORT_SECONDS)
            remaining = await self._count_confirmed(operation)
            if self._result.chunk_count == before and not await self._has_settled_since(operation):
                break
        return remaining

    # --- Around the instance that stops --------------------------------------------------------------------------

    def expect_stop(self) -> None:
        """Has this coordinator expect that the instance is stopped."""
        self._source.drained_until = time.monotonic() + self._seconds + LEAVING_SECONDS

    async def _announce(self, name: str, seconds: float) -> None:
        """Has the instance report to all coordinators that it is going to stop: none copies chunks to it meanwhile.

        Raises `Unreachable`, or `InstanceNotFound` if it leaves.
        """
        self._check_source()
        self._source.drained_until = time.monotonic() + seconds if seconds else 0.0
        leave = report_pb.LeaveOrder()
        leave.ttl.FromNanoseconds(round(seconds * 1e9))
        order = report_pb.Order(leave=leave, operation_name=name)
        await self._orders.execute(self._instance_id, order, ANNOUNCE_SECONDS)

    async def _announce_end(self, operation: Operation) -> None:
        """The drain has ended: the instance is stopped soon, or stays if the drain was cancelled."""
        with suppress(LmkvError):  # it may have stopped already
            await self._announce(operation.name, 0.0 if operation.cancelled.is_set() else LEAVING_SECONDS)

    # --- One pass ------------------------------------------------------------------------------------------------

    async def _copy_sole(self, operation: Operation) -> None:
        """One pass: copies what only the instance holds, while the map is being read."""
        self._failures.clear()
        self._refusals.clear()
        leaving = self._leaving()
        batch_bytes = self._batch_chunks() * KEY_BYTES
        pending: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            self._check_source()
            cursor, sole = self._layout.scan_sole(self._instance_id, leaving, cursor, SCAN_KEYS)
            for fingerprint, keys in sole.items():
                pending[fingerprint] = pending.get(fingerprint, b"") + keys
            for fingerprint in pending:
                while len(pending[fingerprint]) >= batch_bytes or (pending[fingerprint] and not cursor):
                    if self._is_over(operation):
                        return
                    batch, pending[fingerprint] = (
                        pending[fingerprint][:batch_bytes],
                        pending[fingerprint][batch_bytes:],
                    )
                    await self._copy(fingerprint, batch, operation)
            if not cursor:
                return
            await asyncio.sleep(0)

    async def _copy(self, fingerprint: bytes, keys: bytes, operation: Operation) -> None:
        """Copies a batch to the first destination, and what that has no room for to the next destinations."""
        destinations = self.destinations(fingerprint)
        for destination in destinations:
            if (destination.info.instance_id, fingerprint) in self._refusals:
                continue
            keys = await self._fetch(destination, fingerprint, keys, operation)
            if not keys or self._is_over(operation):
                return
        self._fail(keys, self._why_refused(destinations, fingerprint))

    async def _fetch(self, destination: Instance, fingerprint: bytes, keys: bytes, operation: Operation) -> bytes:
        """Has a destination fetch chunks; returns those that another one may be able to take."""
        self._check_source()
        source = self._source.info
        fetch = report_pb.FetchOrder(
            instance_id=source.instance_id,
            epoch=source.epoch,
            peer_address=source.peer_address,
            fingerprint=fingerprint,
            chunk_keys=keys,
            tier=HOST,
            keep_others=not self._request.evict,
            spec=spec_message(self._instances, fingerprint),
        )
        order = report_pb.Order(fetch=fetch, operation_name=operation.name)
        seconds = min(self._deadline - time.monotonic(), ORDER_SECONDS)
        place = (destination.info.instance_id, fingerprint)
        try:
            outcome = await self._orders.execute(place[0], order, seconds, operation.cancelled)
        except LmkvError as error:
            self._refusals[place] = error
            return keys
        refusal = rpc.from_status(outcome.status) if outcome.status.code else None
        self._result.chunk_count += outcome.chunk_count
        self._result.token_count += outcome.token_count
        self._result.transferred_bytes += outcome.transferred_bytes
        self.progress.done_chunk_count += outcome.chunk_count
        self.progress.transferred_bytes += outcome.transferred_bytes
        rest = b""
        for failure in outcome.failures:
            cause = rpc.from_status(failure.status)
            if refusal or isinstance(cause, NoFreeExtents | KvSpecMismatch):
                self._refusals[place] = cause
                rest += join_keys(failure.chunk_keys)
            else:
                self._fail(join_keys(failure.chunk_keys), cause)
        return rest

    def _why_refused(self, destinations: Sequence[Instance], fingerprint: bytes) -> LmkvError:
        if not destinations:
            return KvSpecMismatch(
                "no destination can hold them: none that is registered, transfers chunks, serves their spec and is not "
                "being drained",
                instance_id=self._instance_id,
            )
        refusals = [self._refusals[one.info.instance_id, fingerprint] for one in destinations]
        if any(isinstance(error, NoFreeExtents) for error in refusals):
            advice = "" if self._request.evict else "; add destinations, or allow them to evict other chunks"
            return NoFreeExtents(f"no destination has room{advice}")
        return refusals[-1]

    def _fail(self, keys: bytes, error: LmkvError) -> None:
        failure = self._failures.setdefault(error.reason, pb.DrainFailure(status=rpc.to_status(error)))
        failure.chunk_count += len(keys) // KEY_BYTES

    # --- Around the passes ---------------------------------------------------------------------------------------

    def _conclude(self, remaining: int, operation: Operation) -> pb.DrainResult:
        """The result. Raises the error if nothing was copied though chunks remain, or `OperationCancelled`."""
        result = self._result
        chunks = f"{remaining} chunk{'' if remaining == 1 else 's'}"
        if operation.cancelled.is_set():
            raise OperationCancelled(
                f"cancelled after {result.chunk_count} chunks, whose copies stay; {chunks} held by "
                f"{self._instance_id!r} only",
                chunk_count=result.chunk_count,
                remaining_chunk_count=remaining,
            )
        result.remaining_chunk_count = remaining
        result.failures.extend(self._explain(remaining))
        now = time.time_ns()
        result.pin_count = sum(pin.expire_time_ns > now for pin in self._source.pins.values())
        if remaining and not result.chunk_count:
            status = result.failures[0].status
            status.message = f"nothing was copied, and {chunks} held by {self._instance_id!r} only: {status.message}"
            raise rpc.from_status(status)
        return result

    def _explain(self, remaining: int) -> list[pb.DrainFailure]:
        """The reasons of this pass, for as many chunks as remain: the instance may have evicted some since."""
        explained = []
        for reason in sorted(self._failures, key=lambda one: one == ChunkNotFound.reason):  # may not be held any more
            failure = self._failures[reason]
            failure.chunk_count = min(failure.chunk_count, remaining)
            remaining -= failure.chunk_count
            if failure.chunk_count:
                explained.append(failure)
        if remaining:
            error = Unreachable(
                f"the deadline of {self._seconds:.3g} s has passed"
                if time.monotonic() >= self._deadline
                else "they were stored during the drain, or lost elsewhere; drain again, without traffic"
            )
            explained.append(pb.DrainFailure(chunk_count=remaining, status=rpc.to_status(error)))
        return explained

    async def _count_sole(self) -> int:
        """Chunks that only the instance holds."""
        leaving = self._leaving()
        count = cursor = 0
        while True:
            self._check_source()
            cursor, sole = self._layout.scan_sole(self._instance_id, leaving, cursor, SCAN_KEYS)
            count += sum(len(keys) // KEY_BYTES for keys in sole.values())
            if not cursor:
                return count
            await asyncio.sleep(0)

    async def _count_confirmed(self, operation: Operation) -> int:
        """Returns `_count_sole`. 0 means that the holders elsewhere were alive when this was called.

        The layout map contains the chunks of an instance that was killed until its lease expires.
        """
        renewed_time = time.monotonic() + self._instances.lease_ttl
        if remaining := await self._count_sole():
            return remaining
        deadline = min(self._deadline, time.monotonic() + CONFIRM_SECONDS)
        while time.monotonic() < deadline and not operation.cancelled.is_set():
            if all(one.expire_time >= renewed_time for one in self._instances if one is not self._source):
                break
            await asyncio.sleep(0.05)
        return await self._count_sole()

    async def _has_settled_since(self, operation: Operation) -> bool:
        """Waits, after a pass without effect, until all instances have registered.

        A coordinator that has just restarted does not know all yet. Returns whether there was anything to wait for.
        """
        until = min(self._deadline, self._settle_until)
        waited = False
        while self._registry.is_partial(time.monotonic()) and time.monotonic() < until:
            if operation.cancelled.is_set():
                return False
            waited = True
            await asyncio.sleep(0.05)
        return waited

    async def _wait_synced(self) -> None:
        """Waits until the instance has reported what it holds. Raises `Unreachable` after `SYNC_SECONDS`."""
        deadline = min(self._deadline, time.monotonic() + SYNC_SECONDS)
        while not self._source.synced:  # its reports change it
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"instance {self._instance_id!r} has not reported what it holds yet; retry",
                    instance_id=self._instance_id,
                )
            self._check_source()
            await asyncio.sleep(0.05)

    def _check_source(self) -> None:
        if self._instances.find(self._instance_id) is not self._source:
            raise self._gone()

    def _gone(self) -> InstanceNotFound:
        return InstanceNotFound(
            f"instance {self._instance_id!r} left the fleet or restarted during the drain",
            instance_id=self._instance_id,
        )

    def _leaving(self) -> set[str]:
        """Other instances that are going to stop: being drained by any coordinator, or drained a short time ago."""
        now = time.monotonic()
        return {one.info.instance_id for one in self._instances if one is not self._source and one.is_leaving(now)}

    def _is_over(self, operation: Operation) -> bool:
        return operation.cancelled.is_set() or time.monotonic() >= self._deadline

    def _batch_chunks(self) -> int:
        """Chunks of one order, by the average size of the instance's chunks."""
        for usage in self._source.tiers:
            if usage.tier == HOST and usage.chunk_count > 0 and usage.used_bytes > 0:
                return min(max(BATCH_BYTES * usage.chunk_count // usage.used_bytes, 1), BATCH_CHUNKS)
        return BATCH_CHUNKS


def _free_bytes(instance: Instance) -> int:
    """Free host memory, as last reported."""
    return sum(usage.capacity_bytes - usage.used_bytes for usage in instance.tiers if usage.tier == HOST)


def _timeout_seconds(request: pb.DrainRequest) -> float:
    if not request.HasField("timeout"):
        return LONGEST_SECONDS
    seconds = request.timeout.ToNanoseconds() / 1e9
    if seconds <= 0:
        raise BadSelection(f"timeout {request.timeout.ToJsonString()} is not positive")
    return min(seconds, LONGEST_SECONDS)
