"""RegistryService: translates between nodes and the registry."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from lmkv.errors import BadInstance, LmkvError
from lmkv.rpc import MAX_MESSAGE_BYTES
from lmkv.spec import KvSpec
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.instances import MAX_SHOWN, Instance, Registration
from lmkv_server.coordinator.pages import page_limit, page_token, read_page_token
from lmkv_server.coordinator.registry import Registry
from lmkv_server.coordinator.report_stream import ReportStream

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256
MAX_CONFLICTS = 16
"""Named per instance: in a fleet of two halves everybody conflicts with half of it."""
MAX_PAGE_BYTES = MAX_MESSAGE_BYTES // 2


class RegistryService(pb_grpc.RegistryServiceServicer):
    """The handlers. One event loop runs them all; the registry is its alone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        now = time.monotonic()
        said = registration(request.instance)
        before = self._registry.instances.find(said.instance_id)
        news = before is None or before.said != said
        try:
            instance = self._registry.register(said, now)
        except LmkvError as error:
            logger.warning("refused instance %s at %s: %s", said.instance_id, said.peer_address, error)
            raise
        instance.tiers = tuple(request.instance.tiers)
        instance.engine_count = request.instance.engine_count
        response = pb.RegisterResponse(instance=self._to_proto(instance, now), lease_ttl=duration_pb2.Duration())
        response.lease_ttl.FromNanoseconds(round(self._registry.instances.lease_ttl * 1e9))
        if news:
            _log_registered(response.instance)
        return response

    async def Report(
        self,
        request_iterator: AsyncIterator[pb.ReportRequest],
        context: Any,
    ) -> AsyncIterator[pb.ReportResponse]:
        stream: ReportStream | None = None
        async for report in request_iterator:
            now = time.monotonic()
            try:
                if stream is None:
                    stream = self._registry.open_stream(report.instance_id, report.epoch, now)
                    # Comes also when the connection breaks while a response is on its way, unlike `finally`.
                    context.add_done_callback(lambda _, stream=stream: stream.close())
                stream.apply(report, now)
            except LmkvError as error:
                logger.warning("reports of instance %s end: %s", report.instance_id, error)
                raise
            yield pb.ReportResponse(acked_sequence=stream.sequence, revision=self._registry.layout.revision)

    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        self._registry.deregister(request.instance_id, request.epoch)
        logger.info("instance %s left", request.instance_id)
        return pb.DeregisterResponse()

    async def ListInstances(self, request: pb.ListInstancesRequest, context: Any) -> pb.ListInstancesResponse:
        now = time.monotonic()
        last = read_page_token("ListInstances", request.page_token)
        limit = page_limit(request.page_size)
        rest = sorted(
            (instance for instance in self._registry.instances if instance.said.instance_id > last),
            key=lambda instance: instance.said.instance_id,
        )
        response = pb.ListInstancesResponse()
        for instance in rest[:limit]:
            response.instances.append(self._to_proto(instance, now))
            if response.ByteSize() > MAX_PAGE_BYTES:
                break
        if len(response.instances) < len(rest):
            response.next_page_token = page_token("ListInstances", response.instances[-1].instance_id)
        return response

    def _to_proto(self, instance: Instance, now: float) -> pb.Instance:
        said = instance.said
        return pb.Instance(
            instance_id=said.instance_id,
            epoch=said.epoch,
            peer_address=said.peer_address,
            specs=[spec.to_proto() for spec in said.specs],
            version=said.version,
            tiers=instance.tiers,
            engine_count=instance.engine_count,
            conflicts=[
                pb.SpecConflict(
                    instance_id=conflict.instance_id,
                    model_name=conflict.model_name,
                    field=conflict.field,
                    own_value=conflict.own_value,
                    other_value=conflict.other_value,
                )
                for conflict in self._registry.instances.conflicts(instance, MAX_CONFLICTS)
            ],
            synced=instance.synced,
            register_time=_wall_time(instance.register_time, now),
            expire_time=_wall_time(instance.expire_time, now),
        )


def registration(message: pb.Instance) -> Registration:
    """What a node says of itself, checked. Raises `BadInstance`, `BadKvSpec`."""
    instance_id = message.instance_id
    if not 0 < len(instance_id.encode()) <= MAX_ID_BYTES or not instance_id.isprintable():
        raise BadInstance(
            f"instance_id must have 1 to {MAX_ID_BYTES} bytes, all printable", instance_id=instance_id[:MAX_ID_BYTES]
        )
    if message.epoch <= 0:
        raise BadInstance(f"epoch {message.epoch} is not positive", instance_id=instance_id, epoch=message.epoch)
    host, colon, port = message.peer_address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    if not (host and colon and is_port and host.isprintable() and len(host) <= MAX_ID_BYTES):
        raise BadInstance(
            f"peer_address {message.peer_address[:MAX_SHOWN]!r} is not host:port",
            instance_id=instance_id,
            peer_address=message.peer_address[:MAX_SHOWN],
        )
    return Registration(
        instance_id=instance_id,
        epoch=message.epoch,
        peer_address=message.peer_address,
        specs=tuple(KvSpec.from_proto(spec) for spec in message.specs),
        version=message.version,
    )


def _wall_time(moment: float, now: float) -> timestamp_pb2.Timestamp:
    stamp = timestamp_pb2.Timestamp()
    stamp.FromNanoseconds(time.time_ns() + round((moment - now) * 1e9))
    return stamp


def _log_registered(instance: pb.Instance) -> None:
    models = ", ".join(spec.model_name for spec in instance.specs) or "no engine yet"
    logger.info("instance %s registered from %s (%s)", instance.instance_id, instance.peer_address, models)
    for conflict in instance.conflicts:
        logger.warning(
            "instances %s and %s share nothing of model %s: %s is %s there, %s here",
            conflict.instance_id,
            instance.instance_id,
            conflict.model_name,
            conflict.field,
            conflict.other_value,
            conflict.own_value,
        )
