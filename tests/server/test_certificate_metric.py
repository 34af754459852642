"""Every server exports its version, and the expiry time of its certificate."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lmkv import __version__
from lmkv.auth.credentials import METRIC_NAME, CertificateEnd, validity
from lmkv.config import CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.proxy import Proxy
from tests.support.certificates import Certificates, issue, replace


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return issue(tmp_path / "tls")


async def test_coordinator_node_and_proxy_export_it(certificates: Certificates, runtime_dir: Path) -> None:
    _, end = validity(certificates.cert)
    cert, key = certificates.cert, certificates.key
    config = NodeConfig(
        instance_id="n",
        runtime_dir=str(runtime_dir),
        max_local_cpu_size="16MB",  # type: ignore[arg-type]
        tls_cert=cert,
        tls_key=key,
    )
    proxy = Proxy(ProxyConfig(tls_cert=cert, tls_key=key))
    async with (
        Coordinator(
            CoordinatorConfig(
                port=0,
                http_port=OFF,
                tls_cert=certificates.cert,
                tls_key=certificates.key,
            )
        ) as coordinator,
        Node(config) as node,
    ):
        for registry in (coordinator.metrics, node.metrics.registry, proxy.metrics):
            assert registry.get_sample_value(METRIC_NAME) == end


async def test_a_node_without_one_reports_nothing() -> None:
    async with Coordinator(
        CoordinatorConfig(
            port=0,
            http_port=OFF,
        )
    ) as coordinator:
        assert coordinator.metrics.get_sample_value(METRIC_NAME) is None


def test_a_certificate_that_is_replaced_counts_and_half_of_one_does_not(
    certificates: Certificates, tmp_path: Path
) -> None:
    registry = CollectorRegistry()
    registry.register(CertificateEnd(certificates.cert))
    old = issue(tmp_path / "old", expired=True)
    replace(old.cert, certificates.cert)
    assert registry.get_sample_value(METRIC_NAME) == validity(old.cert)[1]
    Path(certificates.cert).write_text("half of")
    assert registry.get_sample_value(METRIC_NAME) is None
    Path(certificates.cert).unlink()
    assert registry.get_sample_value(METRIC_NAME) is None


async def test_all_servers_export_their_version(runtime_dir: Path) -> None:
    config = NodeConfig(
        instance_id="n",
        runtime_dir=str(runtime_dir),
        max_local_cpu_size="16MB",  # type: ignore[arg-type]
    )
    proxy = Proxy(ProxyConfig())
    picker = Picker(PickerConfig(engines=("http://localhost:8000",), policy="least_loaded"))
    sample = f'lmkv_build_info{{python_version="{platform.python_version()}",version="{__version__}"}} 1.0'
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator, Node(config) as node:
        for registry in (coordinator.metrics, node.metrics.registry, proxy.metrics, picker.metrics):
            assert sample in generate_latest(registry).decode().splitlines()
