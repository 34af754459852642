"""ReportService: reports of nodes, and orders to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Any

from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.errors import LmkvError, ResyncRequired
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.internal.v1 import report_service_pb2_grpc as pb_grpc
from lmkv.keys import KEY_BYTES
from lmkv.telemetry.logs import LimitedLogger
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.operations.clears import Clears
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.registry.registry import Registry, ReportStream
from lmkv_server.coordinator.services.registry import check_quota, check_report, reported_pins, set_state

logger = logging.getLogger(__name__)

_CHANGES = frozenset(("instance_id", "epoch", "sequence", "changes"))
"""Fields of a report that contains changes only."""

MAX_WAITING_BYTES = 64 << 20
"""Size of the orders that wait for one instance to read them."""


class ReportOutbox:
    """The newest acknowledgement, and queued orders. One event loop owns it."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        """Set while there may be a response to take."""
        self.error: LmkvError | None = None
        """Set if the stream has to end with an error."""
        self._sequence = 0
        self._orders: list[pb.Order] = []
        self._size_bytes = 0

    def close(self, reading: asyncio.Task[None]) -> None:
        """Reading ended: wakes the answering task, and marks an exception of `reading` as retrieved."""
        if not reading.cancelled():
            reading.exception()
        self.wake.set()

    def fail(self, error: LmkvError) -> None:
        """Ends the stream with an error, without sending what is queued."""
        self.error = error
        self.wake.set()

    def acknowledge(self, sequence: int, report: pb.ReportRequest) -> None:
        """Acknowledges every report up to this one. For a report with changes only, the next response carries it.

        Instances do not wait for that acknowledgement; most reports are such, and answering costs as much as reading.
        """
        self._sequence = sequence
        if not report.changes or any(field.name not in _CHANGES for field, _ in report.ListFields()):
            self.wake.set()

    def send(self, order: pb.Order) -> None:
        """Queues an order. Ends the stream if the instance does not read its orders."""
        self._size_bytes += order.ByteSize()
        if self._size_bytes > MAX_WAITING_BYTES:
            self._orders.clear()
            self.fail(ResyncRequired(f"more than {MAX_WAITING_BYTES} bytes of orders wait to be read; register again"))
            return
        self._orders.append(order)
        self.wake.set()

    def take(self, revision: int) -> pb.ReportResponse | None:
        """The next response; None if there is none. It has at most one order, because each may be large."""
        if not self._sequence and not self._orders:
            self.wake.clear()
            return None
        response = pb.ReportResponse(acked_sequence=self._sequence, revision=revision, orders=self._orders[:1])
        self._size_bytes -= sum(order.ByteSize() for order in self._orders[:1])
        del self._orders[:1]
        self._sequence = 0
        return response


MAX_WRONG_REPORTS = 20
"""Reports of wrong chunks that one instance may make in a minute: an honest one stops to serve a spec before."""
MAX_REPORTERS = 4096
"""Maximum number of instances of which the times of such reports are kept."""


class WrongReports:
    """Admits reports of wrong chunks, each of which clears chunks at all instances. Pure: time is passed in."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of the last admitted reports, by instance."""

    def admits(self, instance_id: str, now: float) -> bool:
        """Admits one more report of an instance, unless it has made as many in the last minute as it may."""
        times = self._times.setdefault(instance_id, deque(maxlen=MAX_WRONG_REPORTS))
        self._times.move_to_end(instance_id)
        if len(self._times) > MAX_REPORTERS:
            self._times.popitem(last=False)
        if len(times) == MAX_WRONG_REPORTS and now - times[0] < 60:
            return False
        times.append(now)
        return True


MAX_LEAVING_SECONDS = 3600.0
"""Longest time for which an instance may report that it is about to stop."""


class ReportService(pb_grpc.ReportServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns the registry."""

    def __init__(
        self,
        registry: Registry,
        orders: PendingOrders,
        authenticator: Authenticator = OPEN_AUTHENTICATOR,
        layout_store: LayoutStore | None = None,
        clears: Clears | None = None,
    ) -> None:
        """`clears` drop chunks that instances report as wrong; None: nothing does."""
        self._clears = clears
        self._registry = registry
        self._orders = orders
        self._authenticator = authenticator
        self._layout_store = layout_store or NoSharedStore()
        self._outboxes: dict[str, ReportOutbox] = {}
        """The outbox of each instance's newest stream."""
        self._log = LimitedLogger(logger)
        self._wrong_reports = WrongReports()
        self.report_count = 0
        """Reports that were applied since the process started, heartbeats included."""

    async def Report(
        self,
        request_iterator: AsyncIterator[pb.ReportRequest],
        context: Any,
    ) -> AsyncIterator[pb.ReportResponse]:
        outbox = ReportOutbox()
        reading = asyncio.create_task(self._read(request_iterator, outbox, context))
        # Called also when the connection breaks while a response is being sent, unlike `finally`.
        context.add_done_callback(lambda _: reading.cancel())
        reading.add_done_callback(outbox.close)
        while True:
            await outbox.wake.wait()
            if outbox.error is not None:
                reading.cancel()
                raise outbox.error
            if response := outbox.take(self._registry.layout.revision):
                yield response
            elif reading.done():
                reading.result()
                return

    async def _read(self, reports: AsyncIterator[pb.ReportRequest], outbox: ReportOutbox, context: Any) -> None:
        """Applies the reports of one call until it ends or breaks."""
        stream: ReportStream | None = None
        instance_id = ""
        try:
            async for report in reports:
                if stream is None:
                    instance_id = report.instance_id
                    self._registry.instances.get(instance_id, report.epoch)
                    self._registry.instances.check_secret(instance_id, report.secret)
                    self._outboxes[instance_id] = outbox
                    stream = await self._open_stream(report, outbox)
                    self._orders.connect(instance_id, outbox.send)
                check_report(report)
                stream.apply(report, time.monotonic())
                if report.changes:
                    quota = self._authenticator.quota(self._registry.admission.tenant)
                    check_quota(quota, "max_chunks", len(self._registry.layout))
                    await self._layout_store.wait_for_room()
                self.report_count += 1
                self._apply_state(report)
                if report.wrong_keys:
                    await self._clear_wrong(report)
                outbox.acknowledge(stream.sequence, report)
        except LmkvError as error:
            if instance_id:  # empty if its first message could not be decoded
                # The caller of a stream that never opened may not be an instance: its log lines are limited.
                (self._log if stream is None else logger).warning(
                    "report stream of instance %s ended: %s", instance_id, error
                )
            raise
        finally:
            if self._outboxes.get(instance_id) is outbox:
                del self._outboxes[instance_id]
            if stream is not None:
                stream.close()
                self._orders.disconnect(instance_id, outbox.send)

    async def _open_stream(self, report: pb.ReportRequest, outbox: ReportOutbox) -> ReportStream:
        """Opens the stream of a first report. Raises the errors of `Report`."""
        instance_id, epoch = report.instance_id, report.epoch
        instance = self._registry.instances.get(instance_id, epoch)
        if instance.layout_map_id != self._layout_store.map_id:
            raise ResyncRequired("the coordinator's layout map changed; register again")
        if report.reported_elsewhere:
            if not self._layout_store.map_id:
                raise ResyncRequired("this coordinator shares no layout map; report the chunks to it")
            return self._registry.follow(instance_id, epoch, time.monotonic(), self._layout_store)
        publication = await self._layout_store.publish(instance_id, epoch)
        if self._outboxes.get(instance_id) is not outbox:
            raise ResyncRequired(f"another stream of instance {instance_id!r} replaced this one")
        return self._registry.open_stream(instance_id, epoch, time.monotonic(), publication)

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new streams."""
        outboxes = [self._outboxes.get(instance_id)] if instance_id else list(self._outboxes.values())
        for outbox in outboxes:
            if outbox is not None:
                outbox.fail(ResyncRequired(f"{reason}; register again"))

    def _apply_state(self, report: pb.ReportRequest) -> None:
        """Applies what a report contains besides chunks."""
        instance = self._registry.instances.find(report.instance_id)
        if instance:
            self._charge(report)
            set_state(instance, report)
            if report.fetch_serial:
                instance.fetch_serial = report.fetch_serial
                seconds = min(max(report.leaving.ToNanoseconds() / 1e9, 0.0), MAX_LEAVING_SECONDS)
                instance.leaving_until = time.monotonic() + seconds if seconds else 0.0
            if report.HasField("pins"):
                instance.pins = reported_pins(report.pins)
        for outcome in report.outcomes:
            self._orders.complete(report.instance_id, outcome)

    async def _clear_wrong(self, report: pb.ReportRequest) -> None:
        """Has all instances drop chunks that an audit at one of them has found wrong."""
        if self._clears is None:
            return
        if not self._wrong_reports.admits(report.instance_id, time.monotonic()):
            self._log.warning(
                "instance %s has reported wrong chunks %d times in a minute: the next ones are not dropped elsewhere",
                report.instance_id,
                MAX_WRONG_REPORTS,
            )
            return
        try:
            operation = await self._clears.start_wrong(report.wrong_keys)
        except LmkvError as error:
            logger.error("cannot clear wrong chunks of instance %s: %s", report.instance_id, error)
        else:
            logger.warning(
                "an audit at instance %s has found a wrong chunk; %s drops %d keys at all instances",
                report.instance_id,
                operation.name,
                len(report.wrong_keys) // KEY_BYTES,
            )

    def _charge(self, report: pb.ReportRequest) -> None:
        """Charges the budget for what a report makes this coordinator store. Raises `Full`."""
        sizes = {"tiers": sum(tier.ByteSize() for tier in report.tiers)} if report.tiers else {}
        sizes |= {name: getattr(report, name).ByteSize() for name in ("stats", "pins") if report.HasField(name)}
        for item, size_bytes in sizes.items():
            self._registry.instances.budget.charge(report.instance_id, item, size_bytes)
