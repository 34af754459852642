"""Time of one choice of the endpoint picker, for prompts that one of several instances holds as a whole.

A choice begins when the last part of the body has arrived, and ends when its answer is sent. By itself it is measured
in this process: from the message with that part to the first answer of the service, without gRPC. As a gateway sees it,
it is measured over a socket; there a server that does not read the body shows what gRPC, and this client, take of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.coordinator.fleets import LONG_LEASE, SimulatedInstance
from benchmarks.node.lookups import SPEC
from benchmarks.support import timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from benchmarks.systems.null_picker import ENDPOINT
from lmkv import rpc
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR
from lmkv.auth.cache_salts import NONE
from lmkv.auth.credentials import Credentials
from lmkv.config import PickerConfig
from lmkv.errors import LmkvError
from lmkv.ext_proc.external_processor_pb2 import (
    FULL_DUPLEX_STREAMED,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from lmkv.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from lmkv.keys import root_key
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import CheckedServer, free_port
from lmkv_kernels import chunk_keys
from lmkv_server.http.server import HttpOptions, HttpServer
from lmkv_server.proxy.client_salts import ClientSalts
from lmkv_server.proxy.engine import BOTH, Engine
from lmkv_server.proxy.engines import Endpoints, EngineEndpoint, resolve
from lmkv_server.proxy.metrics import PickerMetrics
from lmkv_server.proxy.picker.selection import EnginePicker
from lmkv_server.proxy.picker.service import SERVICE, ExternalProcessorService
from lmkv_server.proxy.routing.health import HealthMonitor
from lmkv_server.proxy.routing.key_lookup import KeyLookup
from lmkv_server.proxy.routing.pools import EnginePool, EnginePools, SessionAffinity, cost_by
from lmkv_server.proxy.upstream.client import Upstream, open_session

TOKEN_COUNT = 100_000
ENGINE_COUNT = 8
PATH = "/v1/completions"
PART_BYTES = 64 << 10
"""Parts in which a gateway sends bodies."""
ARRIVAL_SECONDS = 0.02
"""Time in which the picker has received all parts of a body but the last one."""
WARM_UP = 20
WAIT_SECONDS = 30.0

Pick = Callable[[bytes], Awaitable[tuple[str, float]]]
"""Picks an endpoint for a body; with the seconds that it took."""


class PickerProcess(CheckedServer):
    """A process that serves `ext_proc`."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: str) -> None:
        """Runs a Python module with these arguments and a port. Logs to `NAME.log` in `folder`."""
        self.port = free_port()
        command = [sys.executable, "-m", module, *arguments, "--port", str(self.port)]
        super().__init__(name, command, folder / f"{name}.log")

    def is_ready(self) -> bool:
        """Whether it serves: a picker does once an engine is healthy."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=1)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.RpcError:
                return False


class _StubEngine:
    """Answers what a picker asks of an engine; its tokenizer is a lookup of texts."""

    def __init__(self, instance_id: str, texts: dict[str, bytes]) -> None:
        self._instance_id = instance_id
        self._texts = texts
        routes = [
            Route("/health", lambda _: Response()),
            Route("/metrics", lambda _: Response()),
            Route("/v1/models", self._models),
            Route(PATH, self._complete, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
        ]
        self.http = HttpServer(Starlette(routes=routes), HttpOptions(host="127.0.0.1", port=0))
        self.url = f"http://127.0.0.1:{self.http.port}"

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": SPEC.model_name, "max_model_len": 1 << 20}]})

    async def _complete(self, _: Request) -> Response:
        return JSONResponse({"kv_transfer_params": {"lmkv": {"instance_id": self._instance_id}}})

    async def _tokenize(self, request: Request) -> Response:
        return Response(self._texts[(await request.json())["prompt"]], media_type="application/json")


async def measure(run: BenchmarkRun) -> None:
    """Adds the rows."""
    count = 200 if run.quick else 1000
    chance = random.Random(1)
    prompts = [np.array([chance.randrange(SPEC.vocab_size or 128_000) for _ in range(TOKEN_COUNT)]) for _ in range(8)]
    root = root_key(SPEC.fingerprint)
    keys = [chunk_keys(prompt.astype(np.uint32), root, SPEC.chunk_size) for prompt in prompts]
    fleet = [SimulatedInstance(number, keys[number], SPEC.fingerprint) for number in range(ENGINE_COUNT)]
    bodies = [_body(prompt.tolist()) for prompt in prompts]
    texts = {f"text {number} ".ljust(4 * TOKEN_COUNT, "x"): number for number in range(len(prompts))}
    answers = {text: json.dumps({"tokens": prompts[number].tolist()}).encode() for text, number in texts.items()}
    engines = [_StubEngine(instance.instance_id, answers) for instance in fleet]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.http.aclose)
            await engine.http.start()
        coordinator = stack.enter_context(CoordinatorProcess(run.logs, arguments=LONG_LEASE))
        channel = await stack.enter_async_context(rpc.open_channel(coordinator.address))
        async with asyncio.TaskGroup() as group:
            for instance in fleet:
                group.create_task(instance.join(channel, [SPEC]))
        urls = [engine.url for engine in engines]
        gc.collect()
        gc.freeze()  # as the picker's process does
        async with _service(coordinator.address, urls, fleet) as service:
            for name, part_bytes in (("parts", PART_BYTES), ("whole", 1 << 30)):
                begun = time.process_time()
                await _add(run, f"pick_{name}", count, partial(_pick, service, part_bytes), bodies, urls)
                cpu_seconds = (time.process_time() - begun) / (count + WARM_UP)
                run.add(Row(name=f"pick_{name}_{TOKEN_COUNT}_cpu_ms", value=1e3 * cpu_seconds, unit="ms"))
            asked = [_body(text) for text in texts]
            await _add(run, "pick_text", count, partial(_pick, service, PART_BYTES), asked, urls)
        arguments = ["picker", "--coordinator", coordinator.address]
        arguments += [f"--engine={url}" for url in urls]
        for name, picker in (
            ("null", PickerProcess(run.logs, "null_picker", "benchmarks.systems.null_picker")),
            ("gateway", PickerProcess(run.logs, "picker", "lmkv", *arguments)),
        ):
            await asyncio.to_thread(stack.enter_context, picker)
            gateway = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}"))
            stub: Any = ExternalProcessorStub(gateway)
            expected = [ENDPOINT] * len(bodies) if name == "null" else urls
            await _add(run, f"pick_{name}", count, partial(_pick_over, stub), bodies, expected)


async def _add(run: BenchmarkRun, name: str, count: int, pick: Pick, bodies: list[bytes], urls: list[str]) -> None:
    """Adds median and 99th percentile. Every choice must be the engine that holds the prompt."""
    seconds: list[float] = []
    deadline = time.monotonic() + WAIT_SECONDS
    chance = random.Random(2)  # a fixed order could be that of picks by turns
    while any([(await pick(bodies[at]))[0] not in urls[at] for at in chance.sample(range(len(bodies)), len(bodies))]):
        if time.monotonic() > deadline:
            raise LmkvError(f"{name}: the picker does not find the prompts")
        await asyncio.sleep(0.1)  # it has not listed the instances, or probed the engines, yet
    for number in range(count + WARM_UP):
        at = chance.randrange(len(bodies))
        picked, took = await pick(bodies[at])
        if number >= WARM_UP:
            seconds.append(took)
        if picked not in urls[at]:
            raise LmkvError(f"{name}: {picked} was picked, but {urls[at]} holds the prompt")
    for percent in (50, 99):
        milliseconds = 1e3 * timing.percentile(seconds, percent)
        run.add(Row(name=f"{name}_{TOKEN_COUNT}_p{percent}_ms", value=milliseconds, unit="ms"))


@asynccontextmanager
async def _service(
    address: str, urls: list[str], fleet: list[SimulatedInstance]
) -> AsyncIterator[ExternalProcessorService]:
    """The picker's service, in this process."""
    engines: list[Engine] = []
    metrics = PickerMetrics(engines)
    client = CoordinatorClient([address], Credentials(), 5.0)
    lookup = KeyLookup(client, metrics)
    listing = asyncio.create_task(lookup.run())
    session = open_session()
    try:
        monitor = HealthMonitor(interval_seconds=1.0, timeout_seconds=1.0)
        pool = EnginePool(engines, cost_by("kv_aware"), SessionAffinity(0))
        named = [EngineEndpoint(url=url, role=BOTH) for url in urls]
        upstream = Upstream(session, Credentials().client_contexts())
        endpoints = Endpoints(named, upstream, monitor, EnginePools(pool, None), resolve)
        for engine, instance in zip(engines, fleet, strict=True):
            engine.instance_id = instance.instance_id
            engine.mark_healthy()
        yield ExternalProcessorService(
            EnginePicker(pool, endpoints.clients, lookup, metrics, "x-session-id"),
            endpoints,
            metrics,
            ClientSalts(NONE, "", "", OPEN_AUTHENTICATOR, ""),
            PickerConfig(max_concurrent_requests=1, request_timeout=WAIT_SECONDS),
        )
    finally:
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)
        await lookup.aclose()
        await client.aclose()
        await session.close()


class _LocalCall:
    """A call as the service sees it: it asks only who the caller is."""

    def auth_context(self) -> dict[str, list[bytes]]:
        """Nothing: it has no credentials."""
        return {}

    def peer(self) -> str:
        """This host."""
        return "ipv4:127.0.0.1:1"


async def _pick(service: ExternalProcessorService, part_bytes: int, body: bytes) -> tuple[str, float]:
    """The picker's choice by itself: from the message with the last part, which is not decoded yet, to the answer."""
    *first, last = (message.SerializeToString() for message in _messages(body, part_bytes))
    started = 0.0

    async def messages() -> AsyncIterator[ProcessingRequest]:
        nonlocal started
        for message in first:
            yield ProcessingRequest.FromString(message)
        await asyncio.sleep(ARRIVAL_SECONDS)
        started = time.perf_counter()
        yield ProcessingRequest.FromString(last)

    answers = service.Process(messages(), _LocalCall())
    answer = await anext(answers)
    took = time.perf_counter() - started
    await answers.aclose()  # type: ignore[attr-defined]  # it is a generator
    return _endpoint_of(answer), took


async def _pick_over(stub: Any, body: bytes) -> tuple[str, float]:
    """The picker's choice as a gateway sees it: from the last part of the body to the answer."""
    call = stub.Process(timeout=WAIT_SECONDS)
    *first, last = _messages(body, PART_BYTES)
    for message in first:
        await call.write(message)
    await asyncio.sleep(ARRIVAL_SECONDS)
    started = time.perf_counter()
    await call.write(last)
    answer = await call.read()
    took = time.perf_counter() - started
    call.cancel()
    return _endpoint_of(answer), took


def _messages(body: bytes, part_bytes: int) -> list[ProcessingRequest]:
    """What a gateway sends: the headers, and the body in parts."""
    headers = {":path": PATH, ":method": "POST", "content-type": "application/json"}
    shown = HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])
    modes = ProtocolConfiguration(request_body_mode=FULL_DUPLEX_STREAMED, response_body_mode=FULL_DUPLEX_STREAMED)
    parts = [HttpBody(body=body[begin : begin + part_bytes]) for begin in range(0, len(body), part_bytes)]
    parts[-1].end_of_stream = True
    return [
        ProcessingRequest(request_headers=HttpHeaders(headers=shown), protocol_config=modes),
        *(ProcessingRequest(request_body=part) for part in parts),
    ]


def _endpoint_of(answer: Any) -> str:
    (option,) = answer.request_headers.response.header_mutation.set_headers
    return str(option.header.raw_value.decode())


def _body(prompt: Any) -> bytes:
    return json.dumps({"model": SPEC.model_name, "prompt": prompt, "max_tokens": 16}, separators=(",", ":")).encode()
