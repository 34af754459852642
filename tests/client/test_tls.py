"""The SDK and the commands towards a coordinator that speaks TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmkv.auth.credentials import Credentials
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import Unreachable
from lmkv_client import Coordinator, sync
from lmkv_server.coordinator import coordinator as server
from tests.client.conftest import RunCommand
from tests.support.certificates import Certificates, issue


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return issue(tmp_path)


@pytest.fixture
async def address(certificates: Certificates) -> AsyncIterator[str]:
    """The address of a coordinator that requires client certificates of the issuer."""
    async with server.Coordinator(
        CoordinatorConfig(
            port=0,
            http_port=OFF,
            tls_cert=certificates.cert,
            tls_key=certificates.key,
            tls_client_ca=certificates.ca,
        )
    ) as serving:
        yield serving.address


async def test_the_sdk_and_its_twin_show_a_certificate(address: str, certificates: Certificates) -> None:
    def ask() -> int:
        with sync.Coordinator(address, credentials=certificates.known_client) as coordinator:
            return len(coordinator.instances())

    async with Coordinator(address, credentials=certificates.known_client) as coordinator:
        assert await coordinator.instances() == []
    assert await asyncio.to_thread(ask) == 0


async def test_without_a_certificate_the_handshake_fails(address: str, certificates: Certificates) -> None:
    for credentials in (certificates.client, Credentials()):
        async with Coordinator(address, credentials=credentials, timeout_seconds=2) as coordinator:
            with pytest.raises(Unreachable):
                await coordinator.instances()


async def test_commands_take_the_files_from_the_configuration(
    address: str,
    certificates: Certificates,
    run_command: RunCommand,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await run_command("instances", "--coordinator", address) == 1
    for name in ("ca", "cert", "key"):
        monkeypatch.setenv(f"LMKV_TLS_{name.upper()}", getattr(certificates, name))
    assert await run_command("instances", "--coordinator", address) == 0
    assert capsys.readouterr().out == "no instance is registered\n"
    monkeypatch.setenv("LMKV_TLS_CA", "/nowhere.pem")
    assert await run_command("instances", "--coordinator", address) == 2
    assert "tls_ca: cannot read /nowhere.pem" in capsys.readouterr().err
