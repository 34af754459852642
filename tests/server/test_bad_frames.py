"""Random, cut and mutated frames to the coordinator's gRPC and HTTP ports: nothing breaks, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.coordinator.cases import CHUNKS, PROMPT
from tests.server.coordinator.scripted_instance import ScriptedInstance
from tests.support.specs import LLAMA
from tests.waiting import WAIT_SECONDS

FUZZ_SECONDS = 4.0
FUZZ_ROUNDS = 20
"""Minimum number, also on a busy machine, so that every kind of answer occurs."""
"""How long each port is sent nonsense."""
SOCKET_SECONDS = 0.3
"""How long an answer to nonsense is waited for."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_TYPES = range(10)
PATHS = (
    *("/lookup", "/move", "/clear", "/pin", "/unpin", "/health", "/check_finish", "/query_instance"),
    *(
        "/query_worker_info",
        "/lmkv.v1.CacheService/Lookup",
        "/lmkv.v1.CacheService/Move",
        "/lmkv.v1.CacheService/Watch",
    ),
    *("/google.longrunning.Operations/ListOperations", "/metrics", "/healthz", "/readyz", "/", "/openapi.json"),
)
GOOD_BODIES: tuple[dict[str, Any], ...] = (
    {"tokens": PROMPT},
    {"old_position": ["a", "LocalCPUBackend"], "new_position": ["b", "LocalCPUBackend"], "tokens": PROMPT},
    {"instance_id": "a", "location": "LocalCPUBackend", "tokens": PROMPT},
    {"event_id": "move-18e9fcae81e904f2"},
    {"instance_id": "all"},
    {"tokens": PROMPT, "modelName": "llama", "cacheSalt": "x"},
)
CODES = {"200", "400", "404", "405", "415"}
"""Status codes of answers by handlers."""
STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 1 << 80, 1.5, float("1e308"), "", "x" * 5000, "\0", "ünïcode\ud7ff"),
    *([], {}, [[]], [None], {"a": {"b": []}}, [1 << 40], ["1"], [-5], [True]),
)


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    """A coordinator with a registered instance, which it must still know at the end."""
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=0, lease_ttl=3600.0, cluster_secret="hush")) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
        ScriptedInstance(channel, {}, "a", LLAMA, CHUNKS),
    ):
        open_before = descriptors()
        yield coordinator
        stub: Any = CacheServiceStub(channel)
        answer = await stub.Lookup(LookupRequest(prompt=by_tokens(PROMPT)), timeout=WAIT_SECONDS)
        assert [holder.matched_token_count for holder in answer.holders] == [40]
        async with httpx.AsyncClient(base_url=f"http://{coordinator.http_address}", timeout=60) as http:
            assert (await http.post("/lookup", json={"tokens": PROMPT})).json()["a"] == ["LocalCPUBackend", 40]
        async with asyncio.timeout(WAIT_SECONDS):
            while descriptors() > open_before + 2:  # noqa: ASYNC110 # gRPC closes broken connections after a while
                await asyncio.sleep(0.05)


def descriptors() -> int:
    """Files and sockets that this process, and so the coordinator in it, has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def send(host: str, port: int, frames: bytes, chance: random.Random) -> bytes:
    """Sends bytes over a connection of their own, in pieces, and what comes back within a moment."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        cut = chance.randrange(len(frames) + 1)
        for piece in (frames[:cut], frames[cut:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if chance.random() < 0.5 and writer.can_write_eof():
            writer.write_eof()
        async with asyncio.timeout(SOCKET_SECONDS):
            return await reader.read(1 << 16)
    except (TimeoutError, OSError):
        return b""
    finally:
        writer.transport.abort()


def http2_frames(chance: random.Random) -> bytes:
    """A connection's beginning, then frames whose kinds, flags, streams and lengths mean nothing."""
    frames = [PREFACE if chance.random() < 0.8 else PREFACE[: chance.randrange(len(PREFACE))]]
    if chance.random() < 0.7:
        frames.append(b"\0\0\0\4\0\0\0\0\0")  # settings
    for _ in range(chance.randrange(6)):
        payload = chance.randbytes(chance.choice([0, 1, 5, 8, 100, 5000]))
        length = len(payload) if chance.random() < 0.7 else chance.randrange(1 << 24)
        kind, flags = chance.choice(FRAME_TYPES), chance.randrange(256)
        frames.append(struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, chance.randrange(8)) + payload)
    return b"".join(frames)


def http_request(chance: random.Random) -> bytes:
    """A request that is wrong somewhere: its line, its headers, its length, or its body."""
    body = json.dumps(mutated(chance)).encode(errors="surrogatepass")
    if chance.random() < 0.3:
        body = body[: chance.randrange(len(body) + 1)]
    if chance.random() < 0.1:
        body = chance.randbytes(200)
    length = len(body) if chance.random() < 0.8 else chance.choice([0, 5, 1 << 40, -1])
    method = chance.choice(["POST", "GET", "PUT", "BREW", ""])
    kind = chance.choice(["application/json", "text/plain", "application/json; charset=\xff"])
    head = f"{method} {chance.choice(PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
    whole = head.encode("latin-1") + f"Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body
    if chance.random() < 0.2:
        at = chance.randrange(len(whole))
        whole = whole[:at] + chance.randbytes(3) + whole[at + 3 :]
    return whole


def mutated(chance: random.Random) -> Any:
    """A good body with something strange in it."""
    body = dict(chance.choice(GOOD_BODIES))
    for _ in range(chance.randrange(1, 3)):
        body[chance.choice([*body, "surplus"])] = chance.choice(STRANGE)
    return body if chance.random() < 0.9 else chance.choice(STRANGE)


@pytest.mark.parametrize("make_frames", [http2_frames, lambda chance: chance.randbytes(chance.randrange(1, 3000))])
async def test_the_grpc_port_outlives_frames_that_mean_nothing(coordinator: Coordinator, make_frames: Any) -> None:
    chance = random.Random(3)
    deadline = time.monotonic() + FUZZ_SECONDS
    while time.monotonic() < deadline:
        await asyncio.gather(*(send("127.0.0.1", coordinator.port, make_frames(chance), chance) for _ in range(16)))


async def test_the_http_port_answers_nonsense_without_an_error_of_its_own(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(4)
    port = int(coordinator.http_address.rpartition(":")[2])
    codes: set[str] = set()
    begin, rounds = time.monotonic(), 0
    deadline, last = begin + FUZZ_SECONDS, begin + WAIT_SECONDS
    while time.monotonic() < deadline or rounds < FUZZ_ROUNDS or (not codes >= CODES and time.monotonic() < last):
        rounds += 1
        requests = [http_request(chance) for _ in range(16)]
        answers = await asyncio.gather(*(send("127.0.0.1", port, request, chance) for request in requests))
        for request, answer in zip(requests, answers, strict=True):
            code = answer[9:12].decode("latin-1")
            assert code < "500" or b"not ready" in answer, f"{answer!r}\nto {request!r}"
            codes.add(code)
    assert codes >= CODES, "much of it got through to the handlers"
    assert not [record for record in caplog.records if "unexpectedly" in record.getMessage() or record.exc_info]
