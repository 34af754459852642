"""The coordinator as a process part: ports, health, reflection, its first moments and its end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.internal.v1.report_service_pb2 import ReportRequest
from lmkv.rpc.messages import by_keys
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest
from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.services.services import SERVICE_NAMES
from tests.support.node_stub import NodeStub, registration
from tests.waiting import WAIT_SECONDS, eventually


async def test_every_service_is_healthy_and_reflected(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", *SERVICE_NAMES):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=40)
    async for answer in stream:
        assert set(SERVICE_NAMES) <= {service.name for service in answer.list_services_response.service}


async def test_all_grpc_ports_serve_the_same() -> None:
    further = free_port()
    async with Coordinator(CoordinatorConfig(port=0, monitor_ports={"pull": further}, http_port=OFF)) as coordinator:
        for port in (coordinator.port, further):
            async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
                await stub.ListInstances(ListInstancesRequest(), timeout=WAIT_SECONDS)


async def test_a_port_in_use_is_named_with_the_fix() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as first:
        with pytest.raises(ConfigError, match=rf"port {first.port} on 127\.0\.0\.1 is in use; set port"):
            await Coordinator(CoordinatorConfig(port=first.port, http_port=OFF)).__aenter__()
        with pytest.raises(ConfigError, match=r"monitor_ports\['pull'\]"):
            await Coordinator(CoordinatorConfig(port=0, monitor_ports={"pull": first.port}, http_port=OFF)).__aenter__()
        with pytest.raises(ConfigError, match=rf"http_port {first.port} on 127\.0\.0\.1 is in use; set http_port"):
            await Coordinator(CoordinatorConfig(port=0, http_port=first.port)).__aenter__()
        async with rpc.open_channel(first.address) as channel:
            stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            await stub.ListInstances(ListInstancesRequest(), timeout=WAIT_SECONDS)


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid"])
async def test_a_host_that_is_not_here_is_named_with_the_fix(host: str) -> None:
    with pytest.raises(ConfigError, match="set host"):
        await Coordinator(CoordinatorConfig(host=host, http_port=OFF, port=0)).__aenter__()


async def test_closing_is_idempotent_and_frees_the_port() -> None:
    coordinator = Coordinator(CoordinatorConfig(port=0, http_port=OFF))
    async with coordinator:
        waiting = asyncio.create_task(coordinator.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
    await coordinator.aclose()
    async with Coordinator(CoordinatorConfig(port=coordinator.port, http_port=OFF)):
        pass


async def test_lookups_are_partial_until_all_instances_could_have_reported() -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=4.0)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        registry = NodeStub(channel)
        request = LookupRequest(prompt=by_keys([bytes(16)]))
        assert not (await cache.Lookup(request, timeout=WAIT_SECONDS)).is_complete

        async def is_partial() -> bool:
            return not (await cache.Lookup(request, timeout=WAIT_SECONDS)).is_complete

        await eventually(is_partial, expected=False)
        instance = Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000")
        await registry.Register(registration(instance), timeout=WAIT_SECONDS)
        assert not (await cache.Lookup(request, timeout=WAIT_SECONDS)).is_complete
        stream = registry.Report()
        await stream.write(ReportRequest(instance_id="a", epoch=1, sequence=1, snapshot=True))
        await stream.read()
        assert not (await cache.Lookup(request, timeout=WAIT_SECONDS)).is_complete
        await stream.write(ReportRequest(instance_id="a", epoch=1, sequence=2, snapshot=True, snapshot_end=True))
        await stream.read()
        assert (await cache.Lookup(request, timeout=WAIT_SECONDS)).is_complete


async def test_a_bound_port_is_known_and_revisions_rise_across_restarts() -> None:
    revisions = []
    for _ in range(2):
        async with (
            Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator,
            rpc.open_channel(coordinator.address) as channel,
        ):
            assert coordinator.port > 0
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            revisions.append((await cache.Lookup(LookupRequest(), timeout=WAIT_SECONDS)).revision)
    assert revisions[0] < revisions[1]
