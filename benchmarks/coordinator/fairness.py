"""What a tenant far beyond its quota costs another tenant: latency of lookups, with tokens that have limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.coordinator.fleets import LONG_LEASE, join_all, make_fleet
from benchmarks.coordinator.lookups import Questions
from benchmarks.support import timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.auth.token_bucket import BURST_SECONDS
from lmkv.errors import LmkvError
from lmkv.keys import split_keys
from lmkv.rpc.messages import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_client.demo.cluster import CoordinatorProcess

QUOTA_PER_SECOND = 100
EXCESS = 10
"""Requests that the tenant attempts, over its quota."""
MAX_IN_FLIGHT = 64
CHUNK_COUNT = 20_000
LOOKUP_CHUNKS = 40
PAUSE_SECONDS = 0.005
"""Between two lookups of the tenant that is measured."""
ANSWER_SECONDS = 30.0
QUIET, AT_QUOTA, BEYOND = "quiet", "at_quota", "beyond_quota"
RATES = {QUIET: 0, AT_QUOTA: QUOTA_PER_SECOND, BEYOND: EXCESS * QUOTA_PER_SECOND}


async def measure(run: BenchmarkRun) -> None:
    """Adds the rows. The cases alternate, so that other load affects all."""
    path = run.folder / "tokens.json"  # which is YAML, too
    path.write_text(json.dumps({"tokens": [_entry("a", "engine"), _entry("a", "reader"), _entry("b", "reader")]}))
    rounds, count = (3, 200) if run.quick else (10, 500)
    seconds: dict[str, list[float]] = {name: [] for name in RATES}
    fleet = make_fleet(2, CHUNK_COUNT)
    with CoordinatorProcess(run.logs, arguments=(*LONG_LEASE, "--auth-tokens", str(path))) as coordinator:
        async with _channel(coordinator.address, "a", "engine") as nodes:
            await join_all(fleet, nodes)
            async with _channel(coordinator.address, "a", "reader") as channel:
                questions, cache = Questions(fleet), CacheServiceStub(channel)
                await _lookups(cache, questions, count)  # warms up
                for _ in range(rounds):
                    for name, rate in RATES.items():
                        async with _other_tenant(coordinator.address, rate):
                            seconds[name] += await _lookups(cache, questions, count)
    base = timing.percentile(seconds[QUIET], 99) * 1000
    run.add(Row(name="fair_share_quiet_p99_ms", value=base, unit="ms"))
    for name in (AT_QUOTA, BEYOND):
        value = timing.percentile(seconds[name], 99) * 1000
        run.add(compare(f"fair_share_{name}_p99_ms", value, "ms", "the other tenant sends nothing", base))


async def _lookups(cache: Any, questions: Questions, count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        request = LookupRequest(prompt=by_keys(split_keys(questions.keys(LOOKUP_CHUNKS))))
        begin = time.perf_counter()
        response = await cache.Lookup(request, timeout=ANSWER_SECONDS)
        seconds.append(time.perf_counter() - begin)
        if not response.holders:
            raise LmkvError("a held prompt was not found")
        await asyncio.sleep(PAUSE_SECONDS)
    return seconds


@asynccontextmanager
async def _other_tenant(address: str, rate: int) -> AsyncIterator[None]:
    """The other tenant sends at this rate, from a process of its own, until the end of the block.

    Before the block begins it has used up the requests that it saved: at most those of one second, admitted at once.
    """
    if not rate:
        yield
        return
    command = (sys.executable, "-m", "benchmarks.coordinator.fairness", address, str(rate))
    # Not by asyncio: uvloop forks, which gRPC's threads do not survive.
    with await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not await asyncio.to_thread(process.stdout.readline):  # it sends
                raise LmkvError("the other tenant failed to start")
            yield
        finally:
            process.terminate()


async def _send(address: str, rate: int) -> None:
    """Sends lookups of tenant b at a rate, whatever becomes of them."""
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)
    questions = Questions(make_fleet(2, CHUNK_COUNT))

    async def one() -> None:
        async with slots:
            with contextlib.suppress(grpc.RpcError):
                await cache.Lookup(
                    LookupRequest(prompt=by_keys(split_keys(questions.keys(LOOKUP_CHUNKS)))), timeout=ANSWER_SECONDS
                )

    async with _channel(address, "b", "reader") as channel, asyncio.TaskGroup() as group:
        cache: Any = CacheServiceStub(channel)
        await one()  # connects; refused if the case before has used up the quota
        begin, sent, is_steady = time.monotonic(), 0, False
        while True:
            if not is_steady and time.monotonic() - begin > BURST_SECONDS:
                print("ready", flush=True)
                is_steady = True
            due = int((time.monotonic() - begin) * rate) - sent
            for _ in range(min(due, MAX_IN_FLIGHT)):
                group.create_task(one())
            sent += due
            await asyncio.sleep(0.01)


def _entry(tenant: str, role: str) -> dict[str, Any]:
    limits = {"max_requests_per_second": QUOTA_PER_SECOND} if tenant == "b" else {}
    digest = hashlib.sha256(_token(tenant, role).encode()).hexdigest()
    return {"name": f"{role}-{tenant}", "role": role, "tenant": tenant, "sha256": digest, **limits}


def _token(tenant: str, role: str) -> str:
    return f"{role}-of-tenant-{tenant}"


def _channel(address: str, tenant: str, role: str) -> grpc.aio.Channel:
    return rpc.open_channel(address, Credentials(token=BearerToken(text=_token(tenant, role))))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_send(sys.argv[1], int(sys.argv[2])))
