"""A real browser, a visitor, and instances that obey the coordinator."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Browser, async_playwright

from lmkv.internal.v1.report_service_pb2 import ChunkChange
from lmkv.tiers import DISK, HOST
from lmkv.v1.registry_service_pb2 import TierUsage
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import CHUNKS, KEYS
from tests.server.coordinator.http.page.visitor import GIB, Visitor, report
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance
from tests.support.specs import LLAMA


def arguments() -> dict[str, Any]:
    """How Chromium is started. Fails the test if there is none."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is missing; `make setup` installs it, and so does `apt-get install chromium`")
    # Chromium's sandbox does not work for root.
    return {"executable_path": path, "args": ["--no-sandbox"] if os.geteuid() == 0 else []}


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(**arguments())
        yield running
        await running.close()


@pytest.fixture
async def visitor(browser: Browser, coordinator: Coordinator) -> AsyncIterator[Visitor]:
    visitor = Visitor(browser, coordinator)
    yield visitor
    visitor.check()


@pytest.fixture
async def fleet(make: Make) -> AsyncIterator[dict[str, ScriptedInstance]]:
    """`a` holds the prompt, `b` its first two chunks, the second of them on disk; `c` nothing."""
    a, b, c = make("a", CHUNKS), make("b", KEYS[:1]), make("c")
    async with a, b, c:
        await report(b, changes=[ChunkChange(tier=DISK, fingerprint=LLAMA.fingerprint, admitted_keys=KEYS[1])])
        await report(
            a,
            tiers=[
                TierUsage(tier=HOST, capacity_bytes=8 * GIB, used_bytes=6 * GIB, chunk_count=3),
                TierUsage(
                    tier=DISK,
                    capacity_bytes=100 * GIB,
                    used_bytes=25 * GIB,
                    chunk_count=1234,
                ),
                TierUsage(tier="example", used_bytes=4 * GIB, chunk_count=7),
            ],
            engine_count=2,
        )
        yield {"a": a, "b": b, "c": c}
