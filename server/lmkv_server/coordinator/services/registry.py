"""RegistryService: registration of nodes, and the list of them."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2

from lmkv import __version__
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.errors import Full, InstanceNotFound, LmkvError, VersionMismatch
from lmkv.internal.protocol import OWN_BUILD, PROTOCOL_VERSION, Build, check_builds
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.safe_text import safe_text
from lmkv.telemetry.logs import LimitedLogger
from lmkv.v1 import registry_service_pb2 as pb
from lmkv.v1 import registry_service_pb2_grpc as pb_grpc
from lmkv_server.coordinator.core.instance_info import MAX_SHOWN
from lmkv_server.coordinator.core.instances import NO_ADDRESS, Instance
from lmkv_server.coordinator.layout_store.layout_store import LayoutStore, NoSharedStore
from lmkv_server.coordinator.registry.registry import Registry
from lmkv_server.coordinator.services.pages import page_limit, page_token, read_page_token
from lmkv_server.coordinator.services.registration import (
    check_quota,
    check_secret,
    instance_info,
    set_state,
    stats_message,
)

logger = logging.getLogger(__name__)

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
            quota = self._authenticator.quota(self._registry.tenant)
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
