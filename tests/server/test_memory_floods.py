"""Floods of large requests at servers with the memory of their pods, beside a client of another caller."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import yaml

from benchmarks.floods import NODE_COMMAND, memory_limit
from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.ext_proc.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from lmkv.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.peer_service_pb2 import AcquireRequest
from lmkv.v1.peer_service_pb2_grpc import PeerServiceStub
from lmkv.v1.prompt_pb2 import KeyPrompt, PromptSelector
from tests.server.webhook.pods import HOST
from tests.support.certificates import issue
from tests.support.tokens import entry, write
from tests.waiting import until

DEADLINE_SECONDS = 120.0
FLOOD = 400
AT_ONCE = 100
"""Calls of a flood that waits for their answers."""
HONEST = 20
PART_BYTES = 60_000
TEXT_BYTES = 30 << 20
JSON = {"content-type": "application/json"}
VALUES = b"{}," * 125_000 + b"1234," * 650_000
"""Nearly half of the values, and of the objects among them, that a body may have."""


@contextmanager
def server(component: str, *arguments: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that may use the memory of its pod. An allocation beyond that fails, and ends it."""
    limit = memory_limit(component)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("lmkv")), *arguments],
            stdout=output,
            stderr=output,
            env=dict(os.environ, **environment),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
        )
    try:
        yield process
        assert process.poll() is None, log.read_text()[-3000:]
        assert "MemoryError" not in log.read_text()
    finally:
        process.terminate()
        process.wait(DEADLINE_SECONDS)


async def test_lookups_of_one_tenant_leave_memory_and_answers_to_another(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    tokens = write(tmp_path / "tokens.yaml", entry("reader", "a"), entry("reader", "b"))
    port, log = free_port(), tmp_path / "log"
    arguments = ("coordinator", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_port()))
    large = [  # of the size of a message: tokens are decoded to the same, keys without bytes to eight times that
        LookupRequest(prompt=by_tokens([1] * 250_000)),
        LookupRequest(prompt=PromptSelector(keys=KeyPrompt(chunk_keys=[b""] * 500_000))),
    ]
    small = LookupRequest(prompt=by_tokens(range(100)))
    with server("coordinator", *arguments, "--auth-tokens", tokens, log=log) as process:
        async with (
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="reader-of-a-token"))) as hog,
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="reader-of-b-token"))) as honest,
        ):
            lookup = CacheServiceStub(honest).Lookup
            await lookup(small, timeout=DEADLINE_SECONDS, wait_for_ready=True)
            before = memory(process, "RssAnon")
            calls = [CacheServiceStub(hog).Lookup(large[call % 2], timeout=DEADLINE_SECONDS) for call in range(FLOOD)]
            for _ in range(HONEST):
                await lookup(small, timeout=DEADLINE_SECONDS)
            codes = [await call.code() for call in calls]
            await lookup(small, timeout=DEADLINE_SECONDS)
            await gives_back(process, before)
        assert set(codes) <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
        assert memory(process, "VmHWM") < memory_limit("coordinator")


async def test_refused_calls_to_a_node_leave_memory_and_answers_to_another(
    free_port: Callable[[], int], tmp_path: Path, runtime_dir: Path
) -> None:
    """What is refused is not kept: not by the refusal either. Calls of another caller do not wait behind the flood."""
    tokens = write(tmp_path / "tokens.yaml", entry("engine"), entry("admin"))
    port, log = free_port(), tmp_path / "log"
    environment = {"LMKV_AUTH_TOKEN": "engine-token", "LMKV_RUNTIME_DIR": str(runtime_dir)}
    large, small = AcquireRequest(chunk_keys=[bytes(16)] * 58_000), AcquireRequest(chunk_keys=[bytes(16)] * 10)
    with server(
        "node", *NODE_COMMAND, "--p2p-port", str(port), "--auth-tokens", tokens, log=log, **environment
    ) as process:
        async with (
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="admin-token"))) as hog,
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="engine-token"))) as honest,
        ):
            ask = PeerServiceStub(honest).Acquire
            refused = await code_of(ask(small, timeout=DEADLINE_SECONDS, wait_for_ready=True))
            before = memory(process, "RssAnon")
            codes: Counter[grpc.StatusCode] = Counter()
            is_over = False

            async def repeat() -> None:
                while not is_over:
                    codes[await code_of(PeerServiceStub(hog).Acquire(large, timeout=DEADLINE_SECONDS))] += 1

            flood = [asyncio.create_task(repeat()) for _ in range(AT_ONCE)]
            await until(lambda: codes.total() > AT_ONCE, timeout_seconds=DEADLINE_SECONDS)
            first = codes.total()
            for _ in range(HONEST):
                assert await code_of(ask(small, timeout=DEADLINE_SECONDS)) == refused
            passed = codes.total() - first
            is_over = True
            await asyncio.gather(*flood)
            assert passed < HONEST * AT_ONCE / 2, "calls of another caller waited behind those of the flood"
            assert codes.keys() <= {refused, grpc.StatusCode.RESOURCE_EXHAUSTED}
            await gives_back(process, before)
        assert memory(process, "VmHWM") < memory_limit("node")


async def test_bodies_of_one_gateway_leave_memory_and_answers_of_a_picker_to_another(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    tokens = write(tmp_path / "tokens.yaml", entry("engine", "a"), entry("engine", "b"))
    port, log = free_port(), tmp_path / "log"
    arguments = ("picker", "--host", "127.0.0.1", "--port", str(port), "--coordinator-address", "127.0.0.1:1")
    large = b'{"model": "m", "prompt": [' + b"{}," * 10_000_000 + b"1]}"
    with server("picker", *arguments, "--engines", "http://127.0.0.1:1", "--auth-tokens", tokens, log=log) as process:
        async with (
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="engine-of-a-token"))) as hog,
            rpc.open_channel(f"127.0.0.1:{port}", Credentials(token=BearerToken(text="engine-of-b-token"))) as honest,
        ):
            assert await picked(honest, b'{"model": "m", "prompt": "once"}')
            flood = [asyncio.create_task(picked(hog, large)) for _ in range(10)]
            for _ in range(HONEST):
                assert await picked(honest, b'{"model": "m", "prompt": "once"}')
            await asyncio.gather(*flood)
        assert memory(process, "VmHWM") < memory_limit("picker")


async def picked(channel: grpc.aio.Channel, body: bytes) -> bool:
    """Whether a picker answers a request with this body."""
    stub: Any = ExternalProcessorStub(channel)
    call = stub.Process(timeout=DEADLINE_SECONDS, wait_for_ready=True)
    try:
        await call.write(ProcessingRequest(request_headers=HttpHeaders()))
        for start in range(0, len(body), PART_BYTES):
            await call.write(ProcessingRequest(request_body=HttpBody(body=body[start : start + PART_BYTES])))
        await call.write(ProcessingRequest(request_body=HttpBody(end_of_stream=True)))
        return await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has refused, before it had read all
        return False
    finally:
        call.cancel()


async def code_of(call: Any) -> grpc.StatusCode:
    """The code that a call ends with."""
    code: grpc.StatusCode = await call.code()
    return code


async def gives_back(process: subprocess.Popen[bytes], before: int) -> None:
    """Waits until a server has returned most of the memory that a flood took, besides the pool, which it keeps."""
    shared = memory(process, "VmRSS") - memory(process, "RssAnon")
    taken = memory(process, "VmHWM") - shared - before
    await until(lambda: memory(process, "RssAnon") - before < taken / 2, timeout_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize(
    ("component", "path", "body", "count"),
    [
        ("webhook", "/mutate", b"[" + VALUES + b"1]", 8),
        ("proxy", "/v1/completions", b'{"model": "m", "prompt": [' + 2 * VALUES + b"1]}", 8),
    ],
    ids=("webhook", "proxy"),
)
async def test_bodies_of_one_address_leave_memory_and_answers_to_another(
    component: str, path: str, body: bytes, count: int, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    arguments, url, verify = server_of(component, port, tmp_path)
    with server(component, *arguments, log=log) as process:
        async with httpx.AsyncClient(base_url=url, verify=verify, timeout=DEADLINE_SECONDS) as hog:
            await until(lambda: listens(port), timeout_seconds=DEADLINE_SECONDS)
            flood = [asyncio.create_task(hog.post(path, content=body, headers=JSON)) for _ in range(count)]
            transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2", verify=verify)
            async with httpx.AsyncClient(base_url=url, transport=transport, timeout=DEADLINE_SECONDS) as honest:
                for _ in range(HONEST):
                    assert (await honest.get("/healthz")).status_code == 200
            done = await asyncio.gather(*flood)
        assert {response.status_code for response in done} <= {400, 502, 503}
        assert memory(process, "VmHWM") < memory_limit(component)


def server_of(component: str, port: int, folder: Path) -> tuple[Sequence[str], str, ssl.SSLContext | bool]:
    """The command line of a server that needs no other one, its URL, and how a client verifies it."""
    where = ("--host", "127.0.0.1", "--port", str(port))
    if component == "proxy":
        engine = ("--mode", "route", "--engine", "http://127.0.0.1:1")
        return ("proxy", *where, *engine), f"http://127.0.0.1:{port}", True
    certificates = issue(folder / "tls")
    additions = folder / "additions.yaml"
    additions.write_text(yaml.safe_dump({"both": msgspec.to_builtins(HOST)}))
    server_side = ("--tls-cert", certificates.server.cert, "--tls-key", certificates.server.key)
    verify = ssl.create_default_context(cafile=certificates.ca)
    return ("webhook", *where, "--pod-additions", str(additions), *server_side), f"https://localhost:{port}", verify


def listens(port: int) -> bool:
    """Whether a server listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def memory(process: subprocess.Popen[bytes], field: str) -> int:
    """The memory of a process: `VmRSS`, `RssAnon`, which is not shared, or `VmHWM`, the most that it has had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


async def test_bodies_that_no_engine_takes_are_not_kept(free_port: Callable[[], int], tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    arguments, url, verify = server_of("proxy", port, tmp_path)
    body = b'{"model": "m", "prompt": "' + b"x" * TEXT_BYTES + b'"}'
    with server("proxy", *arguments, log=log) as process:
        async with httpx.AsyncClient(base_url=url, verify=verify, timeout=DEADLINE_SECONDS) as client:
            await until(lambda: listens(port), timeout_seconds=DEADLINE_SECONDS)
            before = memory(process, "RssAnon")
            for _ in range(10):
                answer = await client.post("/v1/completions", content=body, headers=JSON)
                assert answer.status_code in (502, 503)
        assert memory(process, "VmHWM") - before < 6 * TEXT_BYTES, "each was kept"
