"""RegistryService: registration and reports of nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from lmkv.auth.callers import NO_QUOTA, TenantQuota
from lmkv.errors import Full, InstanceNotFound, LmkvError, QuotaExceeded, ResyncRequired
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.telemetry.log_limit import LimitedLogger
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.core.instance_info import MAX_SHOWN
from lmkv_server.coordinator.core.instances import NO_ADDRESS, Instance
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.operations.orders import PendingOrders
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.registry.report_stream import ReportStream
from lmkv_server.coordinator.services.outbox import ReportOutbox
from lmkv_server.coordinator.services.pages import page_limit, page_token, read_page_token
from lmkv_server.coordinator.services.registration import (
    check_report,
    check_secret,
    instance_info,
    reported_pins,
    set_state,
    stats_message,
)

logger = logging.getLogger(__name__)

MAX_CONFLICTS = 16
"""Conflicts listed per instance: an instance may conflict with half of the fleet."""
MAX_PAGE_BYTES = MAX_MESSAGE_BYTES // 2
MAX_LEAVING_SECONDS = 3600.0
"""Longest time for which an instance may report that it is about to stop."""
QUOTA_RETRY_SECONDS = 5.0
"""Retry delay after a tenant reached its quota."""


class RegistryService(pb_grpc.RegistryServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns the registry."""

    def __init__(
        self,
        registry: Registry,
        orders: PendingOrders,
        quota: Callable[[], TenantQuota] = lambda: NO_QUOTA,
        layout_store: LayoutStore | None = None,
    ) -> None:
        self._registry = registry
        self._orders = orders
        self._quota = quota
        self._layout_store = layout_store or NoSharedStore()
        self._outboxes: dict[str, ReportOutbox] = {}
        """The outbox of each instance's newest stream."""
        self._log = LimitedLogger(logger)
        self.report_count = 0
        """Reports that were applied since the process started, heartbeats included."""

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        now = time.monotonic()
        info = instance_info(request.instance)
        check_secret(request.secret, info.instance_id)
        before = self._registry.instances.find(info.instance_id)
        is_new = before is None or before.info != info
        if before is None:
            self._check_quota("max_instances", len(self._registry.instances) + 1)
        try:
            instance = self._registry.register(info, now, request.secret)
        except Full:  # not logged: there may be thousands
            raise
        except LmkvError as error:
            self._log.warning("refused instance %s at %s: %s", info.instance_id, info.peer_address, error)
            raise
        set_state(instance, request.instance)
        instance.layout_map_id = self._layout_store.map_id
        response = pb.RegisterResponse(
            instance=self._to_proto(instance, now),
            lease_ttl=duration_pb2.Duration(),
            layout_map_id=instance.layout_map_id,
        )
        response.lease_ttl.FromNanoseconds(round(self._registry.instances.lease_ttl * 1e9))
        if is_new:
            _log_registered(response.instance)
        return response

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
                    self._check_quota("max_chunks", len(self._registry.layout))
                    await self._layout_store.wait_for_room()
                self.report_count += 1
                self._apply_state(report)
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
            return self._registry.follow(instance_id, epoch, time.monotonic(), self._layout_store.load)
        publication = await self._layout_store.publish(instance_id, epoch)
        if self._outboxes.get(instance_id) is not outbox:
            raise ResyncRequired(f"another stream of instance {instance_id!r} replaced this one")
        return self._registry.open_stream(instance_id, epoch, time.monotonic(), publication)

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of one instance, or of all: they register again and open new ones."""
        outboxes = [self._outboxes.get(instance_id)] if instance_id else list(self._outboxes.values())
        for outbox in outboxes:
            if outbox is not None:
                outbox.fail(ResyncRequired(f"{reason}; register again"))

    def _check_quota(self, limit: str, count: int) -> None:
        most = getattr(self._quota(), limit)
        if most and count > most:
            raise QuotaExceeded(
                f"{limit} of this tenant is {most}; reduce usage, or raise it in the file of auth_tokens",
                limit=limit,
                most=most,
                retry_seconds=QUOTA_RETRY_SECONDS,
            )

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

    def _charge(self, report: pb.ReportRequest) -> None:
        """Charges the budget for what a report makes this coordinator store. Raises `Full`."""
        sizes = {"tiers": sum(tier.ByteSize() for tier in report.tiers)} if report.tiers else {}
        sizes |= {name: getattr(report, name).ByteSize() for name in ("stats", "pins") if report.HasField(name)}
        for item, size_bytes in sizes.items():
            self._registry.instances.budget.charge(report.instance_id, item, size_bytes)

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        self._registry.instances.check_secret(request.instance_id, request.secret)
        self._registry.deregister(request.instance_id, request.epoch)
        logger.info("instance %s left", request.instance_id)
        return pb.DeregisterResponse()

    async def ListInstances(self, request: pb.ListInstancesRequest, context: Any) -> pb.ListInstancesResponse:
        now = time.monotonic()
        last = read_page_token("ListInstances", request.page_token)
        limit = page_limit(request.page_size)
        rest = sorted(
            (instance for instance in self._registry.instances if instance.info.instance_id > last),
            key=lambda instance: instance.info.instance_id,
        )
        response = pb.ListInstancesResponse()
        for instance in rest[:limit]:
            response.instances.append(self._to_proto(instance, now))
            if response.ByteSize() > MAX_PAGE_BYTES:
                break
        if len(response.instances) < len(rest):
            response.next_page_token = page_token("ListInstances", response.instances[-1].instance_id)
        return response

    async def LocateInstance(self, request: pb.LocateInstanceRequest, context: Any) -> pb.LocateInstanceResponse:
        instance = self._registry.instances.find(request.instance_id)
        if instance is None:
            raise InstanceNotFound(
                f"instance {request.instance_id[:MAX_SHOWN]!r} is not registered",
                instance_id=request.instance_id[:MAX_SHOWN],
            )
        return pb.LocateInstanceResponse(epoch=instance.info.epoch, peer_address=instance.info.peer_address)

    def _to_proto(self, instance: Instance, now: float) -> pb.Instance:
        info = instance.info
        return pb.Instance(
            instance_id=info.instance_id,
            epoch=info.epoch,
            peer_address=info.peer_address,
            specs=[spec.to_proto() for spec in info.specs],
            version=info.version,
            tiers=[pb.TierUsage(**asdict(tier)) for tier in instance.tiers],
            engine_count=instance.engine_count,
            conflicts=[
                pb.SpecConflict(**asdict(conflict))
                for conflict in self._registry.instances.models.conflicts(info, MAX_CONFLICTS)
            ],
            synced=instance.synced,
            register_time=_wall_time(instance.register_time, now),
            expire_time=_wall_time(instance.expire_time, now),
            stats=stats_message(instance.stats),
            served_models=[model.to_proto() for model in info.served_models],
            coordinator_count=info.coordinator_count,
            end_time=_timestamp(instance.end_time_ns) if instance.end_time_ns else None,
        )


def _wall_time(moment: float, now: float) -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(time.time_ns() + round((moment - now) * 1e9))
    return stamp


def _timestamp(nanoseconds: int) -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(nanoseconds)
    return stamp


def _log_registered(instance: pb.Instance) -> None:
    models = ", ".join(spec.model_name for spec in instance.specs) or "no engine yet"
    address = instance.peer_address or NO_ADDRESS
    logger.info("instance %s registered from %s (%s)", instance.instance_id, address, models)
    for conflict in instance.conflicts:
        logger.warning(
            "instances %s and %s cannot share chunks of model %s: %s is %s there, %s here",
            conflict.instance_id,
            instance.instance_id,
            conflict.model_name,
            conflict.field,
            conflict.other_value,
            conflict.own_value,
        )
