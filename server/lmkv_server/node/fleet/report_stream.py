"""The node's side of one `Report` call: a snapshot, then changes and heartbeats until it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import grpc

from lmkv import rpc
from lmkv.errors import LmkvError, ResyncRequired, Unreachable
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import ChunkKey, join_keys
from lmkv.tiers import INSTANCE_TIERS
from lmkv_server.node.fleet.registration import FleetContext, InstanceLease
from lmkv_server.node.fleet.reports import ChunkChanges, HeldChunk, outcome_reports

FLUSH_SECONDS = 0.005
"""Delay after the first change, to report several together."""
MAX_WRONG_KEYS = 16_384
"""Most wrong chunks in one report."""


class ReportingSession(Protocol):
    """The session of a report stream. Its implementation is on the floor above."""

    coordinator_address: str

    async def register(self) -> InstanceLease:
        """Registers the node again, as it is now."""

    def response_received(self) -> None:
        """A message of the coordinator has arrived."""

    def synced(self) -> None:
        """The stream's `is_synced` has become true."""


class ReportStream:
    """Reports of one node over one call. `run` it once.

    Passes received orders to the context's `orders`, and reports their outcomes until the coordinator acknowledges
    them.
    """

    def __init__(self, lease: InstanceLease, session: ReportingSession, context: FleetContext) -> None:
        self.is_synced = False
        """Whether the coordinator has acknowledged the snapshot."""
        self._lease = lease
        self._session = session
        self._context = context
        self._orders = context.orders
        self._changes: ChunkChanges | None = None
        self._has_changed = False
        self._digest_due = 0.0
        self._snapshot_sequence: int | None = None
        self._registration_is_outdated = False
        self._sent_outcomes: dict[str, int] = {}  # order id: sequence of the report that carries its outcome
        self._sent_pins_revision = -1
        self._wrong_keys: list[ChunkKey] = []
        self._wake = asyncio.Event()
        self._is_over = asyncio.Event()
        self._sequence = 0

    # --- Changes at the node -------------------------------------------------------------------------------------

    def admitted(self, chunk: HeldChunk) -> None:
        if self._changes is not None:  # else this stream carries no chunks, or the snapshot will contain it
            self._changes.admitted(chunk)
            self._wake.set()

    def evicted(self, tier: str, fingerprint: bytes, key: ChunkKey) -> None:
        """Reports a chunk that is no longer held."""
        if self._changes is not None:
            self._changes.evicted(tier, fingerprint, key)
            self._wake.set()

    def report_wrong(self, keys: Sequence[ChunkKey]) -> None:
        """Reports chunks that all instances are to drop."""
        self._wrong_keys += keys
        self._wake.set()

    def refresh(self) -> None:
        """Registers again before anything else is reported."""
        self._registration_is_outdated = True
        self._wake.set()

    def probe(self) -> None:
        """Sends a heartbeat now, to find out whether the coordinator answers."""
        self._wake.set()

    def end(self) -> None:
        """Makes `run` return soon."""
        self._is_over.set()

    # --- The call ------------------------------------------------------------------------------------------------

    async def run(self, call: Any, *, reports_chunks: bool = True) -> None:
        """Reports until `end` is called, or the call fails; everything but chunks unless `reports_chunks`.

        Raises the cause of a failed call, an `LmkvError`; an `ExceptionGroup` is a bug here.
        """
        self._orders.add_listener(self._session.coordinator_address, self._wake.set)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = (group.create_task(self._send(call, reports_chunks)), group.create_task(self._receive(call)))
                await self._is_over.wait()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            raise _cause(failures) from None
        finally:
            self._changes = None
            self.is_synced = False
            self._orders.remove_listener(self._session.coordinator_address)
            call.cancel()

    async def _send(self, call: Any, reports_chunks: bool) -> None:
        if reports_chunks:
            await self._send_snapshot(call)
        else:
            await self._write(call, pb.ReportRequest(reported_elsewhere=True))
        status_due = time.monotonic()
        register_due = status_due + self._context.register_interval_seconds
        while True:
            await self._woken(status_due)
            if self._registration_is_outdated or time.monotonic() >= register_due:
                self._registration_is_outdated = False
                self._lease = await self._session.register()
                register_due = time.monotonic() + self._context.register_interval_seconds
            if self._changes:
                await asyncio.sleep(FLUSH_SECONDS)
            # No await from here until everything is read, so that digests and outcomes match these changes.
            reports = self._change_reports()
            now = time.monotonic()
            status_interval = self._lease.lease_ttl / 3
            early = status_interval / 2 if reports[-1].changes else 0.0  # a report is sent anyway
            if now >= status_due - early:
                node = self._context.node.describe()
                reports[-1].tiers.extend(node.tiers)
                reports[-1].engine_count = node.engine_count
                if node.HasField("end_time"):
                    reports[-1].end_time.CopyFrom(node.end_time)
                reports[-1].stats.CopyFrom(node.stats)
                status_due = now + status_interval
            if self._sent_pins_revision != self._orders.pins.revision:
                reports.append(pb.ReportRequest(pins=self._orders.pin_list()))
                self._sent_pins_revision = self._orders.pins.revision
            while self._wrong_keys:
                keys, self._wrong_keys = self._wrong_keys[:MAX_WRONG_KEYS], self._wrong_keys[MAX_WRONG_KEYS:]
                reports.append(pb.ReportRequest(wrong_keys=join_keys(keys)))
            # Outcomes follow the changes that their orders made, so that the coordinator has those first.
            unacknowledged = self._orders.unacknowledged(self._session.coordinator_address)
            reports += outcome_reports(one for one in unacknowledged if one.order_id not in self._sent_outcomes)
            for report in reports:
                await self._write(call, report)

    async def _send_snapshot(self, call: Any) -> None:
        held = ChunkChanges(self._context.node.snapshot())
        self._changes = ChunkChanges(limit=self._context.max_pending_changes)
        for report in held.reports(self._lease.chunk_sizes):
            report.snapshot = True
            await self._write(call, report)
        self._snapshot_sequence = self._sequence + 1
        await self._write(call, pb.ReportRequest(snapshot=True, snapshot_end=True))
        self._digest_due = time.monotonic() + self._context.digest_interval_seconds

    def _change_reports(self) -> list[pb.ReportRequest]:
        """The changes since the last call, in at least one report, with digests if they are due.

        Raises `ResyncRequired` if there are more than `max_pending_changes`.
        """
        if self._changes is None:
            return [pb.ReportRequest()]
        changes, self._changes = self._changes, ChunkChanges(limit=self._context.max_pending_changes)
        if changes.overflowed:
            raise ResyncRequired(
                f"{self._context.max_pending_changes} changes are unreported; a snapshot replaces them"
            )
        reports = list(changes.reports(self._lease.chunk_sizes))
        self._has_changed = self._has_changed or bool(changes)
        now = time.monotonic()
        if self._has_changed and now >= self._digest_due:
            tiers = [usage.tier for usage in self._context.node.describe().tiers if usage.tier in INSTANCE_TIERS]
            reports[-1].digests.extend(ChunkChanges(self._context.node.snapshot()).digests(tiers))
            self._digest_due, self._has_changed = now + self._context.digest_interval_seconds, False
        return reports

    async def _woken(self, due: float) -> None:
        """Waits until there is something to report, at the latest until `due`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(due - time.monotonic(), 0)):
                await self._wake.wait()
        self._wake.clear()

    async def _write(self, call: Any, report: pb.ReportRequest) -> None:
        self._sequence += 1
        report.instance_id = self._lease.instance.instance_id
        report.epoch = self._lease.instance.epoch
        report.sequence = self._sequence
        report.fetch_serial = self._orders.arrivals.serial
        if seconds := self._orders.leaving_seconds:
            report.leaving.FromNanoseconds(round(seconds * 1e9))
        if self._sequence == 1:
            report.secret = self._context.secret
        self._sent_outcomes.update((outcome.order_id, self._sequence) for outcome in report.outcomes)
        try:
            await call.write(report)
        except asyncio.InvalidStateError:  # the call is over
            await call.read()  # raises why
            raise Unreachable("the coordinator ended the stream") from None

    async def _receive(self, call: Any) -> None:
        """Every report is acknowledged: without a message for a whole lease the coordinator is unreachable."""
        lease_ttl = self._lease.lease_ttl
        while True:
            try:
                async with asyncio.timeout(lease_ttl):
                    response = await call.read()
            except TimeoutError:
                raise Unreachable(f"no answer for {lease_ttl:g} s") from None
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                raise Unreachable("the coordinator ended the stream")
            self._session.response_received()
            self._check_synced(response.acked_sequence)
            acknowledged = [
                order_id for order_id, sequence in self._sent_outcomes.items() if sequence <= response.acked_sequence
            ]
            for order_id in acknowledged:
                del self._sent_outcomes[order_id]
            self._orders.acknowledge(self._session.coordinator_address, acknowledged)
            for order in response.orders:
                self._orders.start(order, self._session.coordinator_address)

    def _check_synced(self, acked_sequence: int) -> None:
        if not self.is_synced and self._snapshot_sequence is not None and acked_sequence >= self._snapshot_sequence:
            self.is_synced = True
            self._session.synced()


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """Why the call failed: the coordinator's error rather than ours, ours rather than what followed from it."""
    for error in failures.exceptions:
        if isinstance(error, grpc.RpcError):
            return rpc.from_rpc_error(error)
    for error in failures.exceptions:
        if isinstance(error, LmkvError):
            return error
    return failures
