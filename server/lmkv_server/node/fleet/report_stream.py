"""The node's end of one `Report` call: a snapshot, then changes and heartbeats until it ends. Used by `Member`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc

from lmkv import rpc
from lmkv.errors import LmkvError, ResyncRequired, Unreachable
from lmkv.keys import ChunkKey
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.commands.orders import Orders
from lmkv_server.node.fleet.registration import Membership
from lmkv_server.node.fleet.reports import Changes, Held, outcome_reports, record_reports

FLUSH_SECONDS = 0.005
"""How long changes are gathered before they are reported."""


class ReportStream:
    """Reports of one node over one call. `run` it once.

    Orders that come are handed to `orders`, and their outcomes told until the report that carries them is acknowledged.
    `describe` gives the node as it is now, `snapshot` everything it holds now, read in one go. `register` registers
    the node anew, which also brings news of the others. `on_answer` is called with each sign of life of the
    coordinator, `on_told` when `has_told` becomes true. `secret` is the one that the node registered with.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        coordinator_address: str,
        describe: Callable[[], pb.Instance],
        snapshot: Callable[[], Iterable[Held]],
        register: Callable[[], Awaitable[Membership]],
        orders: Orders,
        on_answer: Callable[[], None],
        on_told: Callable[[], None] = lambda: None,
        digest_interval_seconds: float,
        register_interval_seconds: float,
        max_pending_changes: int,
        secret: bytes = b"",
    ) -> None:
        self._membership = membership
        self._coordinator_address = coordinator_address
        self._describe = describe
        self._snapshot = snapshot
        self._register = register
        self._on_answer = on_answer
        self._on_told = on_told
        self._digest_interval_seconds = digest_interval_seconds
        self._register_interval_seconds = register_interval_seconds
        self._max_pending_changes = max_pending_changes
        self._secret = secret
        self.has_told = False
        """Whether the coordinator has acknowledged the snapshot."""
        self._changes: Changes | None = None
        self._has_changed = False
        self._digest_due = 0.0
        self._snapshot_sequence: int | None = None
        self._registration_is_old = False
        self._orders = orders
        self._telling: dict[str, int] = {}  # order id: sequence of the report that carries its outcome
        self._told_pins = -1
        self._told_records = 0
        self._wake = asyncio.Event()
        self._is_over = asyncio.Event()
        self._sequence = 0

    # --- What happens at the node --------------------------------------------------------------------------------

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that a chunk is now held."""
        if self._changes is not None:  # else it is not told here, or the snapshot is still to come and will tell
            self._changes.admitted(tier, fingerprint, key, token_count)
            self._wake.set()

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that a chunk is no longer held."""
        if self._changes is not None:
            self._changes.evicted(tier, fingerprint, key)
            self._wake.set()

    def refresh(self) -> None:
        """Registers anew before anything else is reported."""
        self._registration_is_old = True
        self._wake.set()

    def probe(self) -> None:
        """Sends a heartbeat now, to hear whether anybody is there."""
        self._wake.set()

    def end(self) -> None:
        """Has `run` return soon."""
        self._is_over.set()

    # --- The call ------------------------------------------------------------------------------------------------

    async def run(self, call: Any, *, tells_chunks: bool = True) -> None:
        """Reports until `end` is called, or the call breaks; all but chunks if another coordinator is told those.

        Raises why it broke: an `LmkvError`, or whatever is wrong with this code.
        """
        self._orders.listeners[self._coordinator_address] = self._wake.set
        try:
            async with asyncio.TaskGroup() as group:
                tasks = (group.create_task(self._send(call, tells_chunks)), group.create_task(self._receive(call)))
                await self._is_over.wait()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failures:
            raise _cause(failures) from None
        finally:
            self._changes = None
            self.has_told = False
            self._orders.lost(self._coordinator_address, self._membership.lease_ttl)
            call.cancel()

    async def _send(self, call: Any, tells_chunks: bool) -> None:
        if tells_chunks:
            await self._send_snapshot(call)
        else:
            await self._write(call, pb.ReportRequest(told_elsewhere=True))
        status_due = time.monotonic()
        register_due = status_due + self._register_interval_seconds
        while True:
            await self._woken(status_due)
            if self._registration_is_old or time.monotonic() >= register_due:
                self._registration_is_old = False
                self._membership = await self._register()
                register_due = time.monotonic() + self._register_interval_seconds
            if self._changes:
                await asyncio.sleep(FLUSH_SECONDS)
            # Nothing is awaited from here until all is read, so that digests and outcomes are those of these changes.
            reports = self._change_reports()
            now = time.monotonic()
            status_interval = self._membership.lease_ttl / 3
            early = status_interval / 2 if reports[-1].changes else 0.0  # it goes along with what is told anyway
            if now >= status_due - early:
                node = self._describe()
                reports[-1].tiers.extend(node.tiers)
                reports[-1].engine_count = node.engine_count
                reports[-1].stats.CopyFrom(node.stats)
                status_due = now + status_interval
            if self._told_pins != self._orders.pins.revision:
                reports.append(pb.ReportRequest(pins=self._orders.pin_list()))
                self._told_pins = self._orders.pins.revision
            reports += record_reports(self._orders.records.since(self._told_records, self._coordinator_address))
            self._told_records = self._orders.records.revision
            # Outcomes come behind what the orders changed: whoever hears of one knows what it did.
            untold = self._orders.untold(self._coordinator_address)
            reports += outcome_reports(outcome for outcome in untold if outcome.order_id not in self._telling)
            for report in reports:
                await self._write(call, report)

    async def _send_snapshot(self, call: Any) -> None:
        held = Changes(self._snapshot())
        self._changes = Changes(limit=self._max_pending_changes)
        for report in held.reports(self._membership.chunk_sizes):
            report.snapshot = True
            await self._write(call, report)
        self._snapshot_sequence = self._sequence + 1
        await self._write(call, pb.ReportRequest(snapshot=True, snapshot_end=True))
        self._digest_due = time.monotonic() + self._digest_interval_seconds

    def _change_reports(self) -> list[pb.ReportRequest]:
        """What has changed since the last time, in at least one report, with digests if they are due.

        Raises `ResyncRequired` if that is too much.
        """
        if self._changes is None:
            return [pb.ReportRequest()]
        changes, self._changes = self._changes, Changes(limit=self._max_pending_changes)
        if changes.overflown:
            raise ResyncRequired(f"{self._max_pending_changes} changes piled up; a snapshot will tell them")
        reports = list(changes.reports(self._membership.chunk_sizes))
        self._has_changed = self._has_changed or bool(changes)
        now = time.monotonic()
        if self._has_changed and now >= self._digest_due:
            tiers = [usage.tier for usage in self._describe().tiers]
            reports[-1].digests.extend(Changes(self._snapshot()).digests(tiers))
            self._digest_due, self._has_changed = now + self._digest_interval_seconds, False
        return reports

    async def _woken(self, due: float) -> None:
        """Waits until there is something to say, at the latest until `due`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(due - time.monotonic(), 0)):
                await self._wake.wait()
        self._wake.clear()

    async def _write(self, call: Any, report: pb.ReportRequest) -> None:
        self._sequence += 1
        report.instance_id = self._membership.instance.instance_id
        report.epoch = self._membership.instance.epoch
        report.sequence = self._sequence
        if self._sequence == 1:
            report.secret = self._secret
        self._telling.update((outcome.order_id, self._sequence) for outcome in report.outcomes)
        try:
            await call.write(report)
        except asyncio.InvalidStateError:  # the call is over
            await call.read()  # raises why
            raise Unreachable("the coordinator ended the stream") from None

    async def _receive(self, call: Any) -> None:
        """Every report is acknowledged, so silence for a whole lease means that nobody is there."""
        lease_ttl = self._membership.lease_ttl
        while True:
            try:
                async with asyncio.timeout(lease_ttl):
                    response = await call.read()
            except TimeoutError:
                raise Unreachable(f"no answer for {lease_ttl:g} s") from None
            if response is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                raise Unreachable("the coordinator ended the stream")
            self._on_answer()
            self._note_told(response.acked_sequence)
            heard = [order_id for order_id, sequence in self._telling.items() if sequence <= response.acked_sequence]
            for order_id in heard:
                del self._telling[order_id]
            self._orders.acknowledge(self._coordinator_address, heard)
            for order in response.orders:
                self._orders.take(order, self._coordinator_address)

    def _note_told(self, acked_sequence: int) -> None:
        if not self.has_told and self._snapshot_sequence is not None and acked_sequence >= self._snapshot_sequence:
            self.has_told = True
            self._on_told()


def _cause(failures: ExceptionGroup[Exception]) -> Exception:
    """What broke the call: the coordinator's word before ours, that before what followed from it."""
    for error in failures.exceptions:
        if isinstance(error, grpc.RpcError):
            return rpc.from_rpc_error(error)
    for error in failures.exceptions:
        if isinstance(error, LmkvError):
            return error
    return failures
