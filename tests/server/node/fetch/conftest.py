"""An owner that holds 16 chunks, and readers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.node.peer_parts import LARGE, Parts, keys_of, no_grants
from tests.waiting import until as until

KEYS = keys_of(16)


@pytest.fixture
async def reader() -> AsyncIterator[Parts]:
    async with Parts("reader") as parts:
        yield parts
        parts.check_nothing_left()


@pytest.fixture
async def large_reader() -> AsyncIterator[Parts]:
    async with Parts("reader", spec=LARGE) as parts:
        yield parts
        parts.check_nothing_left()


@pytest.fixture
async def owner() -> AsyncIterator[Parts]:
    async with Parts("owner", chunk_count=64) as parts:
        for key in KEYS:
            parts.put(key)
        yield parts
        await no_grants(parts)
