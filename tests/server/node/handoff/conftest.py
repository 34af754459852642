"""The nodes of a prefill and of a decode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.node.handoff_parts import finish
from tests.server.node.peer_parts import Parts
from tests.waiting import until


@pytest.fixture
async def prefill() -> AsyncIterator[Parts]:
    async with Parts("prefill", chunk_count=64, transfer_channel="shm") as parts:
        yield parts
        await until(lambda: len(parts.senders) == 0)
        parts.check_nothing_left()


@pytest.fixture
async def decode() -> AsyncIterator[Parts]:
    async with Parts("decode", chunk_count=32, transfer_channel="shm") as parts:
        yield parts
        await finish(parts)
