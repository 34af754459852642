"""The picker behind a real Envoy, as gateways of the inference extension configure it: `make test-envoy`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import Front, MakePicker
from tests.server.proxy.picker.test_picks import TOKENS, body, looking_up, some
from tests.server.proxy.routing.test_route import PROMPT, SPEC

ENVOY = os.environ.get("LMKV_ENVOY", "")
"""The program."""
HEADER = "x-gateway-destination-endpoint"
EXTENSIONS = "envoy.extensions"
TYPES = f"type.googleapis.com/{EXTENSIONS}"
PATH = "/v1/completions"
SECONDS = "60s"

pytestmark = pytest.mark.skipif(not ENVOY, reason="needs Envoy: make test-envoy")

WAYS: dict[str, dict[str, Any]] = {
    "header": {"use_http_header": True, "http_header_name": HEADER},
    "metadata": {"metadata_key": {"key": "envoy.lb", "path": [{"key": HEADER}]}},
}
"""How gateways have Envoy find the endpoint that was picked."""

OpenGateway = Callable[..., Awaitable[httpx.AsyncClient]]


def bootstrap(port: int, picker_port: int, way: str, body_mode: str) -> dict[str, Any]:
    """Envoy's configuration: each request passes the picker, and goes to the endpoint that it names."""
    duplex = body_mode == "FULL_DUPLEX_STREAMED"
    processor = {
        "@type": f"{TYPES}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "message_timeout": SECONDS,
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": body_mode,
            "request_trailer_mode": "SEND" if duplex else "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": body_mode if duplex else "STREAMED",
            "response_trailer_mode": "SEND" if duplex else "SKIP",
        },
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "front",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "picker", "typed_config": processor},
            {"name": "router", "typed_config": {"@type": f"{TYPES}.filters.http.router.v3.Router"}},
        ],
    }
    http2 = {
        "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    picker = {"endpoint": {"address": address(picker_port)}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "front",
                    "address": address(port),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": SECONDS,
                    "typed_extension_protocol_options": {f"{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions": http2},
                    "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [picker]}]},
                },
                {
                    "name": "pods",
                    "type": "ORIGINAL_DST",
                    "lb_policy": "CLUSTER_PROVIDED",
                    "connect_timeout": SECONDS,
                    "original_dst_lb_config": WAYS[way],
                },
            ],
        }
    }


def address(port: int) -> dict[str, Any]:
    """A port of this host."""
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@asynccontextmanager
async def envoy(folder: Path, picker_port: int, way: str, body_mode: str) -> AsyncIterator[int]:
    """Runs Envoy in front of a picker; its port."""
    port = free_port()
    config = folder / "envoy.json"
    config.write_text(json.dumps(bootstrap(port, picker_port, way, body_mode)))
    log = folder / "envoy.log"
    flags = ["--config-path", str(config), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(ENVOY, *flags, stdout=out, stderr=out)
    try:
        await until(lambda: process.returncode is not None or listens(port))
        assert process.returncode is None, log.read_text()
        yield port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def listens(port: int) -> bool:
    """Whether something listens at a port of this host."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def open_gateway(stack: AsyncExitStack, tmp_path: Path) -> OpenGateway:

    async def start(front: Front, way: str = "header", body_mode: str = "FULL_DUPLEX_STREAMED") -> httpx.AsyncClient:
        port = await stack.enter_async_context(envoy(tmp_path, front.picker.port, way, body_mode))
        return await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        )

    return start


@pytest.mark.parametrize("body_mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
@pytest.mark.parametrize("way", WAYS)
async def test_a_request_goes_to_the_engine_that_holds_its_prompt(
    coordinator: Coordinator,
    make: Make,
    make_engine: MakeEngine,
    make_picker: MakePicker,
    open_gateway: OpenGateway,
    way: str,
    body_mode: str,
) -> None:
    engines = await some(make_engine)
    keys = keys_of(TOKENS, SPEC)
    async with make("i-0", keys[:1], SPEC), make("i-2", keys[:3], SPEC):
        front = await looking_up(make_picker, engines, coordinator.address)
        gateway = await open_gateway(front, way, body_mode)
        content = body(max_tokens=4)
        forged = {HEADER: f"127.0.0.1:{engines[0].port}", "content-type": "application/json"}
        answers = [await gateway.post(PATH, content=content, headers=forged) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert [len(engine.asked) for engine in engines] == [0, 0, 3]
    assert engines[2].bodies() == [json.loads(content)] * 3
    direct = await _ask(engines[2].url, content)
    assert [answer.json()["choices"] for answer in answers] == [direct["choices"]] * 3
    assert front.metric("lmkv_picker_lookups_total", outcome="hit") == 3
    await until(lambda: front.in_flight(engines[2]) == 0)


async def _ask(url: str, content: bytes) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer: dict[str, Any] = (await client.post(f"{url}{PATH}", content=content)).json()
        return answer


async def test_long_bodies_and_streams_pass_unchanged(
    make_engine: MakeEngine, make_picker: MakePicker, open_gateway: OpenGateway
) -> None:
    engines = await some(make_engine, 1)
    front = await make_picker(engines)
    gateway = await open_gateway(front)
    content = body(prompt=PROMPT, max_tokens=16, stream=True, user="x" * 1_000_000)
    engines[0].going.clear()
    engines[0].hold_after = 2
    async with gateway.stream("POST", PATH, content=content) as answer:
        assert answer.status_code == 200
        lines = aiter(answer.aiter_lines())
        seen = [await anext(lines)]
        assert seen[0].startswith("data: "), "the first token comes while the engine computes the others"
        assert front.in_flight(engines[0]) == 1
        engines[0].going.set()
        seen += [line async for line in lines]
    assert engines[0].bodies() == [json.loads(content)]
    assert [line for line in seen if line][-1] == "data: [DONE]"
    await until(lambda: front.in_flight(engines[0]) == 0)


async def test_the_load_of_a_client_that_leaves_ends(
    make_engine: MakeEngine, make_picker: MakePicker, open_gateway: OpenGateway
) -> None:
    engines = await some(make_engine, 1)
    front = await make_picker(engines)
    gateway = await open_gateway(front)
    engines[0].going.clear()
    asked = asyncio.create_task(gateway.post(PATH, content=body(max_tokens=4)))
    await until(lambda: engines[0].waiting_count == 1)
    assert front.in_flight(engines[0]) == 1
    asked.cancel()
    await until(lambda: front.in_flight(engines[0]) == 0)


async def test_without_a_healthy_engine_clients_learn_when_to_retry(
    make_engine: MakeEngine, make_picker: MakePicker, open_gateway: OpenGateway
) -> None:
    engines = await some(make_engine, 1)
    front = await make_picker(engines)
    gateway = await open_gateway(front)
    engines[0].health = 500
    await until(lambda: not front.picker.engines[0].is_healthy)
    answer = await gateway.post(PATH, content=body())
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert not engines[0].asked
