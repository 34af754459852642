"""A node with a small pool, and an engine that is attached to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.engines.pool_checks import CAPACITY, SPEC


@pytest.fixture
def config(runtime_dir: Path) -> NodeConfig:
    return NodeConfig(
        instance_id="test-node",
        runtime_dir=str(runtime_dir),
        enable_p2p=False,
        max_local_cpu_size=f"{CAPACITY * SPEC.chunk_bytes}B",  # type: ignore[arg-type]  # what people write
    )


@pytest.fixture
async def node(config: NodeConfig) -> AsyncIterator[Node]:
    async with Node(config) as node:
        yield node


@pytest.fixture
async def engine(node: Node) -> AsyncIterator[EngineClient]:
    async with EngineClient(node) as engine:
        yield engine
