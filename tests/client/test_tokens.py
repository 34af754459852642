"""The SDK, the commands and a node towards a coordinator that asks for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import PermissionDenied, Unauthenticated
from lmkv_client import Coordinator, sync
from lmkv_server.coordinator import coordinator as server
from lmkv_server.node.node import Node
from tests.client.conftest import RunCommand
from tests.support.tokens import entry, write


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """Where a coordinator is that asks for tokens."""
    tokens = write(tmp_path / "tokens.yaml", *map(entry, ("engine", "reader", "operator")))
    async with server.Coordinator(CoordinatorConfig(port=0, http_port=OFF, auth_tokens=str(tokens))) as serving:
        yield serving.address


async def test_the_sdk_and_its_twin_show_a_token(address: str) -> None:
    def ask() -> int:
        with sync.Coordinator(address, token="reader-token") as coordinator:
            return len(coordinator.instances())

    async with Coordinator(address, token="reader-token") as coordinator:
        assert await coordinator.instances() == []
        with pytest.raises(PermissionDenied, match=r"reader is reader, and .*/Unpin is open to admin or operator"):
            await coordinator.unpin("n/1")
    assert await asyncio.to_thread(ask) == 0
    async with Coordinator(address) as stranger:
        with pytest.raises(Unauthenticated, match="set auth_token or auth_token_file"):
            await stranger.instances()


async def test_commands_take_it_from_the_configuration(
    address: str,
    run_command: RunCommand,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert await run_command("instances", "--coordinator", address) == 1
    assert "set auth_token or auth_token_file" in capsys.readouterr().err
    file = tmp_path / "token"
    file.write_text("reader-token\n")
    monkeypatch.setenv("LMKV_AUTH_TOKEN_FILE", str(file))
    assert await run_command("instances", "--coordinator", address) == 0
    assert capsys.readouterr().out == "no instance is registered\n"


async def test_a_node_joins_with_its_token_and_not_without(address: str, short_folder: Path) -> None:
    settings = {"runtime_dir": str(short_folder), "coordinator_address": address, "max_local_cpu_size": "16MB"}
    async with (
        Node(NodeConfig(instance_id="known", auth_token="engine-token", **settings)),  # type: ignore[arg-type]
        Node(NodeConfig(instance_id="stranger", **settings)),  # type: ignore[arg-type]
        Coordinator(address, token="reader-token") as coordinator,
    ):
        assert [instance.instance_id for instance in await coordinator.instances()] == ["known"]
