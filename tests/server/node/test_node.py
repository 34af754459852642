"""A node in this process: failed starts, restarts, and how long it has been idle."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import is_locked, node_config
from tests.waiting import WAIT_SECONDS


async def test_a_node_that_fails_to_start_leaves_nothing_behind(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = node_config(runtime_dir, "n", p2p_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="p2p_port"):
            await Node(config).__aenter__()
    assert not is_locked(config.lock_path)
    async with Node(node_config(runtime_dir, "n")):
        assert is_locked(config.lock_path)


async def test_a_node_can_be_restarted_in_one_process(runtime_dir: Path) -> None:
    epochs = []
    for _ in range(3):
        async with Node(node_config(runtime_dir, "n", enable_p2p=False)) as node:
            epochs.append(node.epoch)
            async with EngineClient(node) as engine:
                await engine.store(chunk_keys(0))
    assert epochs == sorted(set(epochs))


async def test_a_node_knows_how_long_it_was_idle(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "n", enable_p2p=False, node_linger=0.2)) as node:
        async with EngineClient(node):
            lingering = asyncio.create_task(node.linger())
            await asyncio.sleep(0.6)  # longer than that
            assert not lingering.done()
        async with asyncio.timeout(WAIT_SECONDS):
            await lingering
