"""Time of one choice of the endpoint picker, for prompts that one of several instances holds as a whole."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
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
from lmkv import rpc
from lmkv.auth.credentials import Credentials
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
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import CheckedServer, free_port
from lmkv_kernels import chunk_keys
from lmkv_server.http.server import HttpServer
from lmkv_server.proxy.engine import BOTH, Engine
from lmkv_server.proxy.metrics import PickerMetrics
from lmkv_server.proxy.picker.selection import EnginePicker, address_of
from lmkv_server.proxy.routing.affinity import SessionAffinity
from lmkv_server.proxy.routing.key_lookup import KeyLookup
from lmkv_server.proxy.routing.policies import cost_by
from lmkv_server.proxy.routing.pools import EnginePool
from lmkv_server.proxy.upstream.client import UpstreamClient, open_session

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
    """An `lmkv picker` process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Logs to `picker.log` in `folder`."""
        self.port = free_port()
        command = [sys.executable, "-m", "lmkv", "picker", "--port", str(self.port), *arguments]
        super().__init__("picker", command, folder / "picker.log")

    def is_ready(self) -> bool:
        """Whether an engine is healthy."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=1)
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
        self.http = HttpServer("127.0.0.1", 0, "port", Starlette(routes=routes))
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
        async with _core(coordinator.address, urls, fleet) as pick:
            begun = time.process_time()
            await _add(run, "pick_tokens", count, pick, bodies, urls)
            cpu_seconds = (time.process_time() - begun) / (count + WARM_UP)
            run.add(Row(name=f"pick_tokens_{TOKEN_COUNT}_cpu_ms", value=1e3 * cpu_seconds, unit="ms"))
            await _add(run, "pick_text", count, pick, [_body(text) for text in texts], urls)
        arguments = [f"--engine={url}" for url in urls]
        picker = PickerProcess(run.logs, "--coordinator", coordinator.address, "--load-tokens", "0", *arguments)
        await asyncio.to_thread(stack.enter_context, picker)
        gateway = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}"))
        stub: Any = ExternalProcessorStub(gateway)
        await _add(run, "pick_gateway", count, lambda body: _pick_over(stub, body), bodies, urls)


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
async def _core(address: str, urls: list[str], fleet: list[SimulatedInstance]) -> AsyncIterator[Pick]:
    """The picker's choice by itself, in this process: from the body to the engine."""
    engines = [Engine(url, BOTH) for url in urls]
    for engine, instance in zip(engines, fleet, strict=True):
        engine.instance_id = instance.instance_id
        engine.mark_healthy()
    metrics = PickerMetrics(engines)
    lookup = KeyLookup([address], Credentials(), 5.0, metrics)
    listing = asyncio.create_task(lookup.run())
    session = open_session()
    try:
        contexts = Credentials().client_contexts()
        clients = {engine: UpstreamClient(engine, session, contexts) for engine in engines}
        pool = EnginePool(engines, cost_by("kv_aware", 0), SessionAffinity(0))
        picker = EnginePicker(pool, clients, lookup, metrics, "x-session-id")

        async def pick(body: bytes) -> tuple[str, float]:
            started = time.perf_counter()
            engine = await picker.pick(PATH, {}, body, None)
            return address_of(engine), time.perf_counter() - started

        yield pick
    finally:
        listing.cancel()
        await asyncio.gather(listing, return_exceptions=True)
        await lookup.aclose()
        await session.close()


async def _pick_over(stub: Any, body: bytes) -> tuple[str, float]:
    """The picker's choice as a gateway sees it: from the last part of the body to the answer."""
    call = stub.Process(timeout=WAIT_SECONDS)
    headers = {":path": PATH, ":method": "POST", "content-type": "application/json"}
    shown = HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()])
    modes = ProtocolConfiguration(request_body_mode=FULL_DUPLEX_STREAMED, response_body_mode=FULL_DUPLEX_STREAMED)
    await call.write(ProcessingRequest(request_headers=HttpHeaders(headers=shown), protocol_config=modes))
    parts = [body[begin : begin + PART_BYTES] for begin in range(0, len(body), PART_BYTES)]
    for part in parts:
        await call.write(ProcessingRequest(request_body=HttpBody(body=part)))
    await asyncio.sleep(ARRIVAL_SECONDS)  # the parts have arrived before the last, empty one
    started = time.perf_counter()
    await call.write(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
    answer = await call.read()
    took = time.perf_counter() - started
    call.cancel()
    (option,) = answer.request_headers.response.header_mutation.set_headers
    return option.header.raw_value.decode(), took


def _body(prompt: Any) -> bytes:
    return json.dumps({"model": SPEC.model_name, "prompt": prompt, "max_tokens": 16}, separators=(",", ":")).encode()
