"""Large bodies wait for their turn to be decoded, at every server that reads some; small ones pass beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from lmkv.config import CoordinatorConfig, PickerConfig
from lmkv.runtime import turns
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.http.server import HttpOptions, HttpServer
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.webhook.app import make_app
from tests.server.proxy.picker.published import Gateway
from tests.server.proxy.scripted_engine import ScriptedEngine
from tests.server.test_places import BODY, proxy_of
from tests.server.webhook.pods import HOST
from tests.waiting import WAIT_SECONDS, until

PADDING = "x" * turns.LARGE_BYTES

Ask = Callable[[str], Coroutine[Any, Any, None]]
"""Sends a request whose body has this padding, and returns when it is answered."""


@asynccontextmanager
async def proxy_url(path: str = "/v1/completions") -> AsyncIterator[str]:
    async with proxy_of() as (server, _):
        yield f"{server.url}{path}"


@asynccontextmanager
async def coordinator_url() -> AsyncIterator[str]:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0)) as server:
        yield f"{server.url}/lookup"


@asynccontextmanager
async def webhook_url() -> AsyncIterator[str]:
    server = HttpServer(make_app({"both": HOST}), HttpOptions(host="127.0.0.1", port=0))
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}/mutate"
    finally:
        await server.aclose()


@asynccontextmanager
async def http(serve: AbstractAsyncContextManager[str], body: dict[str, object]) -> AsyncIterator[Ask]:
    async with serve as url, httpx.AsyncClient(timeout=WAIT_SECONDS) as client:

        async def ask(padding: str) -> None:
            assert (await client.post(url, json=body | {"padding": padding})).status_code < 500

        yield ask


@asynccontextmanager
async def picker() -> AsyncIterator[Ask]:
    engine = ScriptedEngine()
    await engine.start()
    config = PickerConfig(port=0, metrics_port=0, policy="least_loaded", engines=(engine.url,))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.stop)
        server = await stack.enter_async_context(Picker(config))
        await until(lambda: any(one.is_healthy for one in server.engines))
        gateway = Gateway(await stack.enter_async_context(grpc.aio.insecure_channel(server.address)))

        async def ask(padding: str) -> None:
            assert await gateway.pick(json.dumps(BODY | {"padding": padding}).encode())

        yield ask


@pytest.mark.parametrize(
    "serve",
    [
        lambda: http(proxy_url(), BODY),
        lambda: http(proxy_url("/v1/responses"), {"input": "once"}),
        lambda: http(coordinator_url(), {"tokens": [1]}),
        lambda: http(webhook_url(), {}),
        picker,
    ],
    ids=["completion", "response", "lookup", "webhook", "picker"],
)
async def test_a_large_body_waits_for_its_turn_and_small_ones_do_not(
    serve: Callable[[], AbstractAsyncContextManager[Ask]],
) -> None:
    shared = turns.of_loop()
    async with serve() as ask, asyncio.timeout(WAIT_SECONDS):
        async with shared.take("another caller", turns.LARGE_BYTES):
            large = asyncio.create_task(ask(PADDING))
            await until(lambda: shared.waiting_count == 1)
            await ask("")
            assert not large.done()
        await large
        assert shared.waiting_count == 0


@pytest.mark.parametrize("serve", [proxy_url, coordinator_url, webhook_url])
async def test_a_large_body_that_is_no_json_gives_its_turn_to_the_next(
    serve: Callable[[], AbstractAsyncContextManager[str]],
) -> None:
    async with serve() as url, httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
        for _ in range(3):
            sent = {"content": b'{"a": ' + PADDING.encode(), "headers": {"content-type": "application/json"}}
            assert (await client.post(url, **sent)).status_code == 400  # type: ignore[arg-type]
