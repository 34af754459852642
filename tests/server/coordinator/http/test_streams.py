"""Streams of handlers, as lines or as events, from the first answer to the end by either side."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from lmkv.config import CoordinatorConfig
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import CHUNKS, KEYS
from tests.server.coordinator.scripted_instance import Make
from tests.waiting import WAIT_SECONDS

WATCH = "/lmkv.v1.CacheService/Watch"
EVENTS = {"Accept": "text/event-stream"}


@asynccontextmanager
async def watching(http: httpx.AsyncClient, method: str = "POST", **request: Any) -> AsyncIterator[AsyncIterator[str]]:
    """The lines that a watch sends."""
    async with http.stream(method, WATCH, **request) as response:
        assert response.status_code == 200, await response.aread()
        yield response.aiter_lines()


async def changes_of(lines: AsyncIterator[str], instance_id: str) -> dict[str, Any]:
    """The next change of an instance."""
    async for line in lines:
        for change in json.loads(line.removeprefix("data: ") or "{}").get("changes", ()):
            if change["instanceId"] == instance_id:
                return dict(change)
    raise AssertionError("the watch ended")


async def watcher_count(http: httpx.AsyncClient) -> int:
    (line,) = [
        line for line in (await http.get("/metrics")).text.splitlines() if line.startswith("lmkv_coordinator_watchers ")
    ]
    return int(float(line.split()[1]))


async def test_a_watch_comes_as_lines_of_json(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS) as instance, watching(http, json={}) as lines:
        change = await changes_of(lines, "a")
        assert sorted(map(base64.b64decode, change["admittedKeys"])) == sorted(KEYS)
        await instance.evict(KEYS[2:])
        assert list(map(base64.b64decode, (await changes_of(lines, "a"))["evictedKeys"])) == [KEYS[2]]


@pytest.mark.parametrize(
    ("method", "request_"), [("GET", {}), ("GET", {"params": {"start_revision": 0}}), ("POST", {})]
)
async def test_a_watch_comes_as_events_to_who_wants_them(
    http: httpx.AsyncClient, make: Make, method: str, request_: dict[str, Any]
) -> None:
    async with (
        make("a", CHUNKS),
        http.stream(method, WATCH, headers=EVENTS, **request_) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        first = await anext(lines)
        assert first.startswith("data: {")
        assert json.loads(first.removeprefix("data: "))["snapshot"] is True
        assert await anext(lines) == ""


async def test_a_refusal_before_the_first_answer_is_a_status(http: httpx.AsyncClient) -> None:
    for request in ({"json": {"start_revision": "-5x"}}, {"json": {"revision": 3}}):
        response = await http.post(WATCH, **request)
        assert (response.status_code, response.json()["code"]) == (400, 3)
    old = await http.get(WATCH, params={"start_revision": 1})
    assert old.status_code == 400
    assert old.json()["details"][0]["reason"] == "REVISION_COMPACTED"


async def test_a_watcher_that_goes_away_is_forgotten(http: httpx.AsyncClient, make: Make) -> None:
    async with make("a", CHUNKS):
        async with watching(http, json={}) as lines:
            await anext(lines)
            assert await watcher_count(http) == 1
        async with asyncio.timeout(WAIT_SECONDS):
            while await watcher_count(http):  # each look gives the coordinator time to notice
                pass


async def test_open_watches_do_not_keep_a_coordinator_from_stopping(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator,
        httpx.AsyncClient(base_url=coordinator.url, trust_env=False, timeout=WAIT_SECONDS) as http,
        watching(http, json={}) as lines,
    ):
        await anext(lines)
        async with asyncio.timeout(WAIT_SECONDS):  # a watch has no end by itself
            await coordinator.aclose()
        with pytest.raises(httpx.RemoteProtocolError):
            [line async for line in lines]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
