"""Nodes that run orders."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node.commands.order_parts import (
    KEYS,
    SPEC,
    Coordinating,
    Shelf,
    coordinating,
)
from tests.server.node.ordering import until
from tests.server.node.peer_parts import Parts


@pytest.fixture
async def reader() -> AsyncIterator[Parts]:
    async with Parts("reader") as parts:
        yield parts


@pytest.fixture
async def here(reader: Parts) -> AsyncIterator[Coordinating]:
    async with coordinating(reader) as giving:
        yield giving


@pytest.fixture
async def owner() -> AsyncIterator[Parts]:
    async with Parts("owner", chunk_count=64) as parts:
        for key in KEYS:
            parts.put(key)
        yield parts
        await until(lambda: len(parts.service.grants) == 0)
        parts.check_nothing_left()


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    tier = HostTier(64 * SPEC.chunk_bytes)
    async with OrderRunner(OrderContext(instance_id="n", tier=tier, engines=EngineSessions(tier))) as orders:
        yield Shelf(orders, tier)
    tier.check()
    assert not any(chunk.holds for chunk in tier)
