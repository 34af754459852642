"""RegistryService: registration of nodes, the list of them, and checks of what they register and report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from lmkv import __version__
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.caller import TenantQuota
from lmkv.errors import (
    BadInstance,
    BadKvSpec,
    BadMessage,
    Full,
    InstanceNotFound,
    LmkvError,
    QuotaExceeded,
    VersionMismatch,
)
from lmkv.internal import OWN_BUILD, PROTOCOL_VERSION, Build, check_builds
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.rpc.requests import page_limit, page_token, read_page_token
from lmkv.safe_text import safe_text
from lmkv.spec import MAX_FIELD_BYTES, MAX_PARTS, MAX_SERVED_MODELS, MAX_SPECS, KvSpec, ServedModel
from lmkv.telemetry.logs import LimitedLogger
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.core.instances import NO_ADDRESS, Instance
from lmkv_server.coordinator.core.models import (
    MAX_SHOWN,
    InstanceInfo,
    ReportedPin,
    ReportedStats,
    ReportedTier,
    ReportedTraffic,
)
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.operations.pins import MAX_PINS
from lmkv_server.coordinator.registry.registry import Registry

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 256
SECRET_BYTES = range(16, 65)
"""Valid lengths of an instance's secret."""
MAX_INSTANCE_BYTES = 512 << 10
"""Size limit of a registration: half a message."""
MAX_CHANGES = 4096
MAX_OUTCOMES = 16_384
MAX_TIERS = 16
MAX_STATS_BYTES = 64 << 10
QUOTA_RETRY_SECONDS = 5.0
"""Retry delay after a tenant reached its quota."""


def instance_info(message: pb.Instance) -> InstanceInfo:
    """The registration in a message. Raises `BadInstance`, `BadKvSpec` if it is invalid."""
    instance_id = message.instance_id
    if message.ByteSize() > MAX_INSTANCE_BYTES:
        raise BadInstance(
            f"instance has {message.ByteSize()} bytes; at most {MAX_INSTANCE_BYTES} are allowed",
            instance_id=instance_id[:MAX_ID_BYTES],
            field="instance",
        )
    if not 0 < len(instance_id.encode()) <= MAX_ID_BYTES or not instance_id.isprintable():
        raise BadInstance(
            f"instance_id must have 1 to {MAX_ID_BYTES} bytes, all printable", instance_id=instance_id[:MAX_ID_BYTES]
        )
    if message.epoch <= 0:
        raise BadInstance(f"epoch {message.epoch} is not positive", instance_id=instance_id, epoch=message.epoch)
    if message.peer_address and not _is_address(message.peer_address):
        raise BadInstance(
            f"peer_address {message.peer_address[:MAX_SHOWN]!r} is not host:port",
            instance_id=instance_id,
            peer_address=message.peer_address[:MAX_SHOWN],
        )
    specs = _specs(message)
    return InstanceInfo(
        instance_id=instance_id,
        epoch=message.epoch,
        peer_address=message.peer_address,
        specs=specs,
        version=message.version,
        size_bytes=message.ByteSize(),
        served_models=served_models(message.served_models, {spec.fingerprint for spec in specs}),
        coordinator_count=message.coordinator_count,
    )


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536
    return bool(host and colon and is_port and host.isprintable() and len(host) <= MAX_ID_BYTES)


def check_report(report: report_pb.ReportRequest) -> None:
    """Raises `BadMessage`, which names the field, if a report exceeds a limit."""
    for name, count, limit in (
        ("changes", len(report.changes), MAX_CHANGES),
        ("outcomes", len(report.outcomes), MAX_OUTCOMES),
        ("tiers", len(report.tiers), MAX_TIERS),
        ("digests", len(report.digests), MAX_TIERS),
        ("pins", len(report.pins.pins), MAX_PINS),
        ("stats, in bytes,", report.stats.ByteSize(), MAX_STATS_BYTES),
    ):
        if count > limit:
            raise BadMessage(f"{name} of a report: {count}; at most {limit} are allowed", limit=limit)


def check_quota(quota: TenantQuota, limit: str, count: int) -> None:
    """Raises `QuotaExceeded` if the count exceeds the tenant's limit of this name."""
    most = getattr(quota, limit)
    if most and count > most:
        raise QuotaExceeded(
            f"{limit} of this tenant is {most}; reduce usage, or raise it in the file of auth_tokens",
            limit=limit,
            most=most,
            retry_seconds=QUOTA_RETRY_SECONDS,
        )


def check_secret(secret: bytes, instance_id: str) -> None:
    """Raises `BadInstance` if the secret is too short or too long."""
    if secret and len(secret) not in SECRET_BYTES:
        raise BadInstance(
            f"secret has {len(secret)} bytes; it must have {SECRET_BYTES.start} to {SECRET_BYTES.stop - 1}",
            instance_id=instance_id,
            field="secret",
        )


def _specs(message: pb.Instance) -> tuple[KvSpec, ...]:
    if len(message.specs) > MAX_SPECS:
        raise BadInstance(
            f"specs: {len(message.specs)} specs; an instance has at most {MAX_SPECS}, one per kind of engine that "
            "has attached",
            instance_id=message.instance_id,
            field="specs",
        )
    for spec in message.specs:
        if len(spec.more_parts) >= MAX_PARTS:
            raise BadInstance(
                f"specs.more_parts has {len(spec.more_parts)} parts; at most {MAX_PARTS - 1} are allowed",
                instance_id=message.instance_id,
                field="specs.more_parts",
            )
        _check_texts(spec, "specs", message.instance_id)
        for part in spec.more_parts:
            _check_texts(part, "specs.more_parts", message.instance_id)
    return tuple(KvSpec.from_proto(spec) for spec in message.specs)


def _check_texts(message: Message, name: str, instance_id: str) -> None:
    """Raises `BadInstance`, which names the field, if a text is too long."""
    for descriptor, value in message.ListFields():
        if isinstance(value, str) and len(value.encode()) > MAX_FIELD_BYTES:
            field = f"{name}.{descriptor.name}"
            raise BadInstance(
                f"{field} has {len(value.encode())} bytes; at most {MAX_FIELD_BYTES} are allowed",
                instance_id=instance_id,
                field=field,
            )


MAX_TIME_NS = 253_402_300_799 * 1_000_000_000
"""The last second that a `Timestamp` may have: the end of the year 9999."""


def set_state(instance: Instance, message: pb.Instance | report_pb.ReportRequest) -> None:
    """Keeps what a registration or a report says of the instance besides its chunks and pins."""
    if message.tiers or message.engine_count:
        instance.tiers = tuple(ReportedTier(**_values(usage)) for usage in message.tiers)
        instance.engine_count = message.engine_count
        instance.end_time_ns = min(max(0, message.end_time.seconds * 1_000_000_000), MAX_TIME_NS)
    if message.HasField("stats"):
        instance.stats = reported_stats(message.stats)


def reported_stats(message: pb.InstanceStats) -> ReportedStats:
    """The statistics in a message."""
    return ReportedStats(
        asked_chunks=message.asked_chunks,
        own_chunks=message.own_chunks,
        peer_chunks=message.peer_chunks,
        evicted_chunks=message.evicted_chunks,
        load_count=message.load_count,
        load_seconds=message.load_duration.ToNanoseconds() / 1e9,
        avoided_prefill_seconds=message.avoided_prefill_duration.ToNanoseconds() / 1e9,
        traffic=tuple(ReportedTraffic(**_values(peer)) for peer in message.traffic),
        wrong_chunks=message.wrong_chunks,
        stopped_models=tuple(message.stopped_models),
    )


def stats_message(stats: ReportedStats) -> pb.InstanceStats:
    """The inverse of `reported_stats`."""
    message = pb.InstanceStats(
        asked_chunks=stats.asked_chunks,
        own_chunks=stats.own_chunks,
        peer_chunks=stats.peer_chunks,
        evicted_chunks=stats.evicted_chunks,
        load_count=stats.load_count,
        traffic=[pb.PeerTraffic(**asdict(peer)) for peer in stats.traffic],
        wrong_chunks=stats.wrong_chunks,
        stopped_models=stats.stopped_models,
    )
    if stats.load_count:
        message.load_duration.FromNanoseconds(round(stats.load_seconds * 1e9))
        message.avoided_prefill_duration.FromNanoseconds(round(stats.avoided_prefill_seconds * 1e9))
    return message


def reported_pins(pins: report_pb.PinList) -> dict[str, ReportedPin]:
    """The pins in a report, by id."""
    return {
        pin.pin_id: ReportedPin(
            pin_id=pin.pin_id,
            tier=pin.position.tier,
            chunk_count=pin.chunk_count,
            token_count=pin.token_count,
            expire_time_ns=pin.expire_time.ToNanoseconds(),
        )
        for pin in pins.pins
    }


def _values(message: Message) -> dict[str, Any]:
    """All fields of a message by name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def served_models(
    messages: Sequence[chunk_pb2.ServedModel], fingerprints: Collection[bytes]
) -> tuple[ServedModel, ...]:
    """The served models in a message. Raises `BadKvSpec` if they are invalid."""
    if len(messages) > MAX_SERVED_MODELS:
        raise BadKvSpec(
            f"served_models has {len(messages)} entries; at most {MAX_SERVED_MODELS} are allowed",
            field="served_models",
            limit=MAX_SERVED_MODELS,
        )
    models = tuple(
        ServedModel(name=one.name, fingerprint=one.fingerprint, lora_identity=one.lora_identity) for one in messages
    )
    if any(model.fingerprint not in fingerprints for model in models):
        raise BadKvSpec("served_models: a fingerprint is of none of the instance's specs", field="served_models")
    return models


MAX_CONFLICTS = 16
"""Conflicts listed per instance: an instance may conflict with half of the fleet."""
MAX_PAGE_BYTES = MAX_MESSAGE_BYTES // 2


class RegistryService(pb_grpc.RegistryServiceServicer):
    """Handlers of one tenant. One event loop runs them all, and owns the registry."""

    def __init__(
        self,
        registry: Registry,
        authenticator: Authenticator = OPEN_AUTHENTICATOR,
        layout_store: LayoutStore | None = None,
    ) -> None:
        self._registry = registry
        self._authenticator = authenticator
        self._layout_store = layout_store or NoSharedStore()
        self._log = LimitedLogger(logger)

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        now = time.monotonic()
        self._check_build(request)
        info = instance_info(request.instance)
        check_secret(request.secret, info.instance_id)
        before = self._registry.instances.find(info.instance_id)
        is_new = before is None or before.info != info
        if before is None:
            quota = self._authenticator.quota(self._registry.admission.tenant)
            check_quota(quota, "max_instances", len(self._registry.instances) + 1)
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
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
        )
        response.lease_ttl.FromNanoseconds(round(self._registry.instances.lease_ttl * 1e9))
        if is_new:
            _log_registered(response.instance)
        return response

    def _check_build(self, request: pb.RegisterRequest) -> None:
        """Refuses a node that speaks another protocol. Its other fields may mean something else: they are not read."""
        said = request.instance
        try:
            check_builds(
                node=Build(version=said.version, protocol_version=request.protocol_version), coordinator=OWN_BUILD
            )
        except VersionMismatch as error:
            self._log.warning("refused instance %s: %s", safe_text(said.instance_id, MAX_SHOWN), error)
            raise

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
        response, size_bytes = pb.ListInstancesResponse(), 0
        for instance in rest[:limit]:
            listed = self._to_proto(instance, now)
            response.instances.append(listed)
            size_bytes += listed.ByteSize()
            if size_bytes > MAX_PAGE_BYTES:
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
