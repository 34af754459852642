"""Every server exports the expiry time of its certificate."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lmkv.auth.credentials import METRIC_NAME, CertificateEnd, validity
from lmkv.config import CoordinatorConfig, NodeConfig, ProxyConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.proxy.proxy import Proxy
from tests.support.certificates import Certificates, issue, replace


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    """A certificate and its issuer."""
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
