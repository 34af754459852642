"""A coordinator that speaks TLS on all its ports, and those who come to it."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.config import ClientConfig, CoordinatorConfig, NodeConfig
from lmkv.v1 import registry_service_pb2, registry_service_pb2_grpc
from lmkv_client.coordinator import Coordinator as SdkCoordinator
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.support.certificates import Certificates, issue, swap

INSTANCES = "/lmkv.v1.RegistryService/ListInstances"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("tls"))


def make_coordinator(credentials: Credentials) -> Coordinator:
    return Coordinator(
        CoordinatorConfig(
            port=0, http_port=0, tls_cert=credentials.cert, tls_key=credentials.key, tls_client_ca=credentials.client_ca
        )
    )


def make_client(coordinator: Coordinator, credentials: Credentials) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=credentials.ca or None)
    if credentials.cert:
        context.load_cert_chain(credentials.cert, credentials.key)
    return httpx.AsyncClient(base_url=coordinator.url, verify=context, trust_env=False, timeout=60)


async def test_both_ports_speak_tls_and_nothing_else(certificates: Certificates) -> None:
    async with make_coordinator(certificates.server) as coordinator:
        assert coordinator.url == f"https://{coordinator.http_address}"
        async with make_client(coordinator, certificates.client) as http:
            assert (await http.post(INSTANCES, headers={"Origin": coordinator.url})).status_code == 200
        async with rpc.open_channel(coordinator.address, certificates.client) as channel:
            stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            await stub.ListInstances(registry_service_pb2.ListInstancesRequest(), timeout=60)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://{coordinator.http_address}/healthz")
        async with make_client(coordinator, Credentials()) as trusts_others:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await trusts_others.get("/healthz")


async def test_a_strict_coordinator_accepts_only_certificates_of_its_issuer(certificates: Certificates) -> None:
    async with make_coordinator(certificates.strict_server) as coordinator:
        async with make_client(coordinator, certificates.known_client) as known:
            assert (await known.get("/healthz")).status_code == 200
        async with make_client(coordinator, certificates.client) as unknown:
            with pytest.raises(httpx.TransportError):
                await unknown.get("/healthz")


async def test_a_node_and_a_tool_come_over_tls(certificates: Certificates, short_folder: Path) -> None:
    files: dict[str, Any] = {"tls_ca": certificates.ca, "tls_cert": certificates.cert, "tls_key": certificates.key}
    async with make_coordinator(certificates.strict_server) as coordinator:
        config = NodeConfig(
            instance_id="node-1",
            coordinator_address=(coordinator.address,),
            max_local_cpu_size=0.01,
            runtime_dir=str(short_folder),
            **files,
        )
        async with Node(config) as node, asyncio.timeout(20):
            await node.fleet.started()
            async with SdkCoordinator(coordinator.address, credentials=ClientConfig(**files).credentials) as sdk:
                assert [instance.instance_id for instance in await sdk.instances()] == ["node-1"]


async def test_a_certificate_that_is_replaced_counts_on_both_ports_at_once(tmp_path: Path) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served = swap(tmp_path / "server", first)
    async with make_coordinator(served.strict_server) as coordinator:
        for current, old in ((first, second), (second, first)):
            swap(tmp_path / "server", current)
            async with make_client(coordinator, current.known_client) as http:
                assert (await http.get("/healthz")).status_code == 200
            async with make_client(coordinator, old.known_client) as http:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await http.get("/healthz")
            mixed = Credentials(ca=current.ca, cert=old.cert, key=old.key)
            async with make_client(coordinator, mixed) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/healthz")
            async with rpc.open_channel(coordinator.address, current.known_client) as channel:
                stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
                await stub.ListInstances(registry_service_pb2.ListInstancesRequest(), timeout=60)
