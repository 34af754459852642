"""Measures how a flood of large requests slows down other callers of each server: `python -m benchmarks.floods`.

A caller sends large requests from a process of its own, as fast as they are answered; another caller sends small ones,
one after the other. The former has the lowest priority, so that it takes no processor time of the others, as if it ran
on another host. The ratio is the latter's p99 over its p99 without the flood. A server may use the memory that the
chart gives it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import yaml

from benchmarks.support import timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.errors import LmkvError
from lmkv.ext_proc.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from lmkv.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.peer_service_pb2 import AcquireRequest
from lmkv.v1.peer_service_pb2_grpc import PeerServiceStub

QUIET_SECONDS, FLOOD_SECONDS, REST_SECONDS = 5.0, 20.0, 3.0
QUICK_QUIET_SECONDS, QUICK_FLOOD_SECONDS = 2.0, 8.0
PAUSE_SECONDS = 0.005
LEAST_PRIORITY = 19
"""Between two requests of the caller that is measured."""
WARM_UP_CALLS = 20
START_SECONDS = ANSWER_SECONDS = 60.0
HOG, HONEST = "127.0.0.1", "127.0.0.2"
"""The addresses of the two callers over HTTP."""
VALUES = yaml.safe_load((Path(__file__).parents[1] / "helm/lmkv/values.yaml").read_text())
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20}
UNLIMITED_BYTES = 1 << 30
"""Memory that a server may use if the chart sets no limit, as for nodes, whose pool decides."""
NODE_COMMAND = (
    *("node", "--instance-id", "n", "--max-local-cpu-size", "64MB"),
    *("--enable-p2p", "--p2p-host", "127.0.0.1"),
)


def memory_limit(component: str) -> int:
    """The memory in bytes that the chart gives a component's pod."""
    text = VALUES.get(component, {}).get("resources", {}).get("limits", {}).get("memory")
    return int(text[:-2]) * UNITS[text[-2:]] if text else UNLIMITED_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a server listens, and who the caller is."""

    port: int
    token: str = ""
    address: str = ""
    """The caller's own, over HTTP."""


Ask = Callable[[Place], Any]
"""A context manager for one caller: inside, its value sends a request and returns when it is answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A server, the flood, and the caller beside it."""

    name: str
    component: str
    command: Sequence[str]
    flood: Ask
    concurrency: int
    honest: Ask
    ports: Sequence[str]
    """Flags of ports: the first is that which is asked."""
    has_tokens: bool = False


# ---- callers


@asynccontextmanager
async def http(
    place: Place, method: str, path: str, body: bytes = b"", *, has_tls: bool = False
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A caller over HTTP, on one connection while the server keeps it."""
    context = ssl.create_default_context() if has_tls else None
    if context:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is its own issuer
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    request = f"{head}{len(body)}\r\n\r\n".encode() + body
    open_one = partial(asyncio.open_connection, "127.0.0.1", place.port, local_addr=(place.address, 0), ssl=context)
    reader, writer = await open_one()

    async def ask() -> None:
        nonlocal reader, writer
        try:
            writer.write(request)
            await writer.drain()
            header = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(": ", 1) for line in header.decode().split("\r\n")[1:-2])
            await reader.readexactly(int(fields.get("content-length", 0)))
            if fields.get("connection") != "close":
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()
        reader, writer = await open_one()

    try:
        yield ask
    finally:
        writer.close()


@asynccontextmanager
async def unary(place: Place, stub: Any, method: str, message: Any) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A caller over gRPC."""
    credentials = Credentials(token=BearerToken(text=place.token)) if place.token else rpc.PLAINTEXT
    async with rpc.open_channel(f"127.0.0.1:{place.port}", credentials) as channel:

        async def ask() -> None:
            with suppress(grpc.aio.AioRpcError):
                await getattr(stub(channel), method)(message, timeout=ANSWER_SECONDS, wait_for_ready=True)

        yield ask


@asynccontextmanager
async def streamed(place: Place, parts: Sequence[bytes]) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A gateway that has the body of a request before the picker."""
    credentials = Credentials(token=BearerToken(text=place.token)) if place.token else rpc.PLAINTEXT
    async with rpc.open_channel(f"127.0.0.1:{place.port}", credentials) as channel:

        async def ask() -> None:
            stub: Any = ExternalProcessorStub(channel)
            call = stub.Process(timeout=ANSWER_SECONDS, wait_for_ready=True)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(ProcessingRequest(request_headers=HttpHeaders()))
                for part in parts:
                    await call.write(ProcessingRequest(request_body=HttpBody(body=part)))
                await call.write(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
                await call.read()
            call.cancel()

        yield ask


# ---- cases


def cases(folder: Path) -> Iterator[Case]:
    """One of each server."""
    tokens = b'{"tokens": [' + b"1," * ((2 << 20) - 8) + b"1]}"  # a few bytes below the limit
    objects = b'{"model": "m", "prompt": [' + b"{}," * (3 << 20) + b"1]}"
    text = b'{"model": "m", "prompt": "' + b"once " * (6 << 20) + b'"}'
    coordinator = ("coordinator", "--host", "127.0.0.1")
    small = partial(http, method="POST", path="/v1/completions", body=b'{"model": "m", "prompt": "once"}')
    proxy = ("proxy", "--mode", "route", "--engine", "http://127.0.0.1:1", "--host", "127.0.0.1")
    yield Case(
        name="coordinator_rpc",
        component="coordinator",
        command=coordinator,
        ports=("--port", "--http-port"),
        flood=partial(
            unary, stub=CacheServiceStub, method="Lookup", message=LookupRequest(prompt=by_tokens([1] * 250_000))
        ),
        concurrency=100,
        honest=partial(
            unary, stub=CacheServiceStub, method="Lookup", message=LookupRequest(prompt=by_tokens(range(100)))
        ),
        has_tokens=True,
    )
    yield Case(
        name="coordinator_http",
        component="coordinator",
        command=coordinator,
        ports=("--http-port", "--port"),
        flood=partial(http, method="POST", path="/lookup", body=tokens),
        concurrency=200,
        honest=partial(http, method="GET", path="/healthz"),
    )
    acquire = AcquireRequest(chunk_keys=[bytes(16)] * 58_000)
    yield Case(
        name="node_rpc",
        component="node",
        command=NODE_COMMAND,
        ports=("--p2p-port",),
        flood=partial(unary, stub=PeerServiceStub, method="Acquire", message=acquire),
        concurrency=100,
        honest=partial(
            unary, stub=PeerServiceStub, method="Acquire", message=AcquireRequest(chunk_keys=[bytes(16)] * 10)
        ),
        has_tokens=True,
    )
    for name, body in (("objects", objects), ("text", text)):
        yield Case(
            name=f"proxy_{name}",
            component="proxy",
            command=proxy,
            ports=("--port",),
            flood=partial(http, method="POST", path="/v1/completions", body=body),
            concurrency=8,
            honest=small,
        )
    yield Case(
        name="picker",
        component="picker",
        command=(
            *("picker", "--engines", "http://127.0.0.1:1", "--host", "127.0.0.1"),
            *("--coordinator-address", "127.0.0.1:1"),
        ),
        ports=("--port",),
        flood=partial(streamed, parts=[objects[at : at + 60_000] for at in range(0, len(objects), 60_000)]),
        concurrency=8,
        honest=partial(streamed, parts=[b'{"model": "m", "prompt": "once"}']),
        has_tokens=True,
    )
    additions = folder / "additions.yaml"
    additions.write_text("both: {user: 10001, args: [], env: [], volume_mounts: [], volumes: []}\n")
    cert, key = folder / "tls.crt", folder / "tls.key"
    if not cert.exists():
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout"]
        subprocess.run([*made, key, "-out", cert], check=True, capture_output=True)
    yield Case(
        name="webhook",
        component="webhook",
        command=(
            *("webhook", "--pod-additions", str(additions), "--host", "127.0.0.1"),
            *("--tls-cert", str(cert), "--tls-key", str(key)),
        ),
        ports=("--port",),
        flood=partial(http, method="POST", path="/mutate", body=b"[" + b"{}," * 1_300_000 + b"1]", has_tls=True),
        concurrency=8,
        honest=partial(http, method="POST", path="/mutate", body=b"{}", has_tls=True),
    )


# ---- measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--case", action="append", metavar="NAME", help="measure this one; may be repeated")


def measure(run: BenchmarkRun) -> None:
    """Adds the rows of each case."""
    for case in cases(run.folder):
        if run.args.case and case.name not in run.args.case:
            continue
        run.say(f"{case.name}: {case.concurrency} large requests at a time")
        asyncio.run(_measure(run, case))


async def _measure(run: BenchmarkRun, case: Case) -> None:
    seconds = (QUICK_QUIET_SECONDS, QUICK_FLOOD_SECONDS) if run.quick else (QUIET_SECONDS, FLOOD_SECONDS)
    with _server(run, case) as (process, place):
        hog = replace(place, token="hog" if case.has_tokens else "", address=HOG)
        async with case.honest(place) as ask:
            for _ in range(WARM_UP_CALLS):
                await ask()
            quiet = await _latencies(ask, seconds[0])
            before = _memory(process, "VmRSS")
            flood = multiprocessing.get_context("spawn").Process(
                target=_flood, args=(case.name, run.folder, hog, seconds[1]), daemon=True
            )
            flood.start()
            assert flood.pid is not None
            os.setpriority(os.PRIO_PROCESS, flood.pid, LEAST_PRIORITY)
            beside = await _latencies(ask, seconds[1], until=flood)
            flood.join()
            if process.poll() is not None:
                run.fail(f"{case.name}: the server has ended with {process.returncode}")
                return
            await _latencies(ask, REST_SECONDS)
        ms = [1e3 * timing.percentile(each, 99) for each in (beside, quiet)]
        run.add(
            compare(f"{case.name}_p99_ms", ms[0], "ms", "without the flood", ms[1]),
            Row(name=f"{case.name}_longest_ms", value=1e3 * max(beside), unit="ms"),
            Row(name=f"{case.name}_peak_mib", value=_memory(process, "VmHWM"), unit="MiB"),
            compare(f"{case.name}_kept_mib", _memory(process, "VmRSS"), "MiB", "before the flood", before),
        )


@contextmanager
def _server(run: BenchmarkRun, case: Case) -> Iterator[tuple[subprocess.Popen[bytes], Place]]:
    """The server of a case, and where it is asked."""
    is_node = case.component == "node"
    limit = memory_limit(case.component)
    flags, ports = [], [_free_port() for _ in case.ports]
    for flag, port in zip(case.ports, ports, strict=True):
        flags += [flag, str(port)]
    if case.has_tokens:
        tokens = run.folder / "tokens.json"  # which is YAML, too
        tokens.write_text(json.dumps({"tokens": [_entry(name) for name in ("hog", "honest")]}))
        flags += ["--auth-tokens", str(tokens)]
    run.logs.mkdir(parents=True, exist_ok=True)
    log = run.logs / f"{case.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("lmkv")), *case.command, *flags],
            stdout=output,
            stderr=output,
            env=dict(os.environ, LMKV_RUNTIME_DIR=str(run.folder), LMKV_AUTH_TOKEN="honest") if is_node else None,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", ports[0])):
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise LmkvError(f"{case.name} does not listen: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield process, Place(port=ports[0], token="honest" if case.has_tokens else "", address=HONEST)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def _entry(name: str) -> dict[str, str]:
    return {"name": name, "role": "admin", "sha256": hashlib.sha256(name.encode()).hexdigest()}


def _flood(name: str, folder: Path, place: Place, seconds: float) -> None:
    """The other process: large requests, a number of them at a time."""
    case = next(case for case in cases(folder) if case.name == name)

    async def ask_on(deadline: float) -> None:
        async with case.flood(place) as ask:
            while time.monotonic() < deadline:
                await ask()

    async def flood() -> None:
        deadline = time.monotonic() + seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds + ANSWER_SECONDS):
                await asyncio.gather(*(ask_on(deadline) for _ in range(case.concurrency)), return_exceptions=True)

    asyncio.run(flood())


async def _latencies(
    ask: Callable[[], Awaitable[None]], seconds: float, until: multiprocessing.process.BaseProcess | None = None
) -> list[float]:
    taken = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or (until and until.is_alive()):
        begin = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - begin)
        await asyncio.sleep(PAUSE_SECONDS)
    return taken


def _memory(process: subprocess.Popen[bytes], name: str) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines() if process.poll() is None else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), 0.0)


BENCHMARK = Benchmark(name="floods", description=__doc__.splitlines()[0], measure=measure, add_arguments=add_arguments)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
