"""Lookups at a coordinator that knows a million chunks of 50 instances: over a stream, unary, many at once, by HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.coordinator.fleets import LONG_LEASE, SimulatedInstance, join_all, make_fleet
from benchmarks.coordinator.layouts import INSTANCE_COUNT, random_keys
from benchmarks.node.lookups import ANSWER_SECONDS, SPEC, WARM_UP_CALLS
from benchmarks.support import machine, timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import compare
from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.internal.v1.lookup_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv.internal.v1.lookup_service_pb2_grpc import LookupServiceStub
from lmkv.keys import KEY_BYTES, chunk_keys, join_keys, root_key, split_keys
from lmkv_client import Coordinator as Client
from lmkv_client.demo.cluster import CoordinatorProcess

CHUNK_COUNT = 1_000_000
IN_FLIGHT = 16
MANY_ROUNDS = 4
MANY_INSTANCES = 64
HTTP_TOKENS = 131_072

Ask = Callable[[Any], Awaitable[object]]


async def measure(run: BenchmarkRun) -> None:
    """Adds the rows."""
    fleet = make_fleet(INSTANCE_COUNT, CHUNK_COUNT)
    with CoordinatorProcess(run.logs, arguments=LONG_LEASE) as coordinator:
        async with rpc.open_channel(coordinator.address) as channel:
            await join_all(fleet, channel)
            questions = Questions(fleet)
            async with RawLookupStream(channel) as line:
                await _measure_one_client(run, channel, line, questions)
                await _measure_last_of_many(run, channel, line, questions)
            await _measure_many(run, channel, coordinator, questions)
            await _measure_http(run, channel, coordinator.http_address)


class Questions:
    """Lookups of prompts that are somewhere in a fleet, each with one holder."""

    def __init__(self, fleet: Sequence[SimulatedInstance]) -> None:
        self._fleet = fleet
        self._random = random.Random(1)

    def keys(self, chunk_count: int) -> bytes:
        """Keys of a prompt of `chunk_count` chunks, another prompt at each call: a repeated one is answered faster."""
        keys = self._random.choice(self._fleet).keys
        first = self._random.randrange(len(keys) // KEY_BYTES - chunk_count)
        return keys[KEY_BYTES * first : KEY_BYTES * (first + chunk_count)]

    def ask(self, chunk_count: int) -> LookupRequest:
        """The lookup of a node."""
        return LookupRequest(chunk_keys=self.keys(chunk_count))


class RawLookupStream:
    """One `LookupStream` call, one question at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = LookupServiceStub(channel)
        self._call = stub.LookupStream()

    async def __aenter__(self) -> RawLookupStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._call.done_writing()

    async def ask(self, request: LookupRequest) -> LookupResponse:
        """Asks and waits for the answer. Raises `LmkvError` if it is none."""
        await self._call.write(LookupStreamRequest(requests=[request]))
        answer = await self._call.read()
        if answer is grpc.aio.EOF or not answer.results[0].HasField("response"):  # type: ignore[attr-defined]
            raise LmkvError("the coordinator did not answer a lookup")
        response: LookupResponse = answer.results[0].response
        return response


async def _measure_one_client(
    run: BenchmarkRun, channel: grpc.aio.Channel, line: RawLookupStream, questions: Questions
) -> None:
    stub: Any = LookupServiceStub(channel)
    health: Any = health_pb2_grpc.HealthStub(channel)
    count = 300 if run.quick else 5000
    (held,) = (await line.ask(questions.ask(40))).holders
    if held.matched_chunk_count != 40:
        raise LmkvError(f"a holder of 40 chunks is said to hold {held.matched_chunk_count}")

    streamed, long, empty, unary, healthy = await _in_turns(
        count,
        (line.ask, lambda: questions.ask(40)),
        (line.ask, lambda: questions.ask(400)),
        (line.ask, LookupRequest),
        (partial(stub.Lookup, timeout=ANSWER_SECONDS), lambda: questions.ask(40)),
        (partial(health.Check, timeout=ANSWER_SECONDS), health_pb2.HealthCheckRequest),
    )
    _add_percentiles(run, "lookup_stream", streamed, "an empty lookup", empty)
    _add_percentiles(run, "lookup_unary", unary, "Health.Check", healthy)
    run.add(compare("lookup_400_p50_ms", _milliseconds(long, 50), "ms", "an empty lookup", _milliseconds(empty, 50)))


async def _measure_last_of_many(
    run: BenchmarkRun, channel: grpc.aio.Channel, line: RawLookupStream, questions: Questions
) -> None:
    """With more instances, of which only the last one holds the prompt."""
    more = [SimulatedInstance(number, b"") for number in range(INSTANCE_COUNT + 1, MANY_INSTANCES)]
    last = SimulatedInstance(MANY_INSTANCES, random_keys(MANY_INSTANCES, CHUNK_COUNT // INSTANCE_COUNT))
    await join_all([*more, last], channel)
    at_last = Questions([last])
    seconds, anywhere = await _in_turns(
        300 if run.quick else 5000, (line.ask, lambda: at_last.ask(40)), (line.ask, lambda: questions.ask(40))
    )
    run.add(
        compare("lookup_last_of_64_p50_ms", _milliseconds(seconds, 50), "ms", "anywhere", _milliseconds(anywhere, 50))
    )


async def _measure_many(
    run: BenchmarkRun, channel: grpc.aio.Channel, coordinator: CoordinatorProcess, questions: Questions
) -> None:
    """A number of lookups in flight: of one client on one stream, or of many clients, each on its own stream."""
    async with Client(coordinator.address) as client, client.lookup_stream() as stream:

        async def ask(request: LookupRequest) -> object:
            return await stream.lookup(keys=split_keys(request.chunk_keys))

        lines = [RawLookupStream(channel) for _ in range(IN_FLIGHT)]
        pid = coordinator.pid
        await _measure_rate(run, "", pid, questions, [ask] * IN_FLIGHT)
        await _measure_rate(run, "_streams", pid, questions, [line.ask for line in lines])
        await asyncio.gather(*(line.aclose() for line in lines))


async def _measure_rate(run: BenchmarkRun, suffix: str, pid: int, questions: Questions, asks: Sequence[Ask]) -> None:
    """Throughput and processor time of clients that each send one lookup after the other."""
    count = 1_000 if run.quick else 10_000
    kinds = (lambda: questions.ask(40), LookupRequest)
    seconds, processor_seconds = [0.0, 0.0], [0.0, 0.0]
    for kind in (0, 1) * MANY_ROUNDS:
        requests = [kinds[kind]() for _ in range(count)]
        before, started = machine.cpu_seconds([pid]), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number, ask in enumerate(asks):
                tasks.create_task(_ask_all(ask, requests[number :: len(asks)]))
        seconds[kind] += time.perf_counter() - started
        processor_seconds[kind] += machine.cpu_seconds([pid]) - before
    rates = [MANY_ROUNDS * count / taken for taken in seconds]
    processor = [1e6 * taken / MANY_ROUNDS / count for taken in processor_seconds]
    run.add(compare(f"lookup_rps_{len(asks)}{suffix}", rates[0], "lookups/s", "empty lookups", rates[1]))
    run.add(compare(f"lookup_server_cpu_us{suffix}", processor[0], "us", "empty lookups", processor[1]))


async def _ask_all(ask: Ask, requests: Sequence[LookupRequest]) -> None:
    for request in requests:
        await ask(request)


async def _measure_http(run: BenchmarkRun, channel: grpc.aio.Channel, address: str) -> None:
    """A long prompt by its tokens, as JSON, over a connection that stays."""
    tokens = np.random.default_rng(5).integers(0, SPEC.vocab_size, HTTP_TOKENS, dtype=np.uint32)
    keys = join_keys(chunk_keys(tokens, root_key(SPEC.fingerprint), SPEC.chunk_size))
    await SimulatedInstance(MANY_INSTANCES + 1, keys, SPEC.fingerprint).join(channel, [SPEC])
    body = json.dumps({"tokens": tokens.tolist()})
    connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)

    def ask() -> dict[str, Any]:
        connection.request("POST", "/lookup", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise LmkvError(f"POST /lookup: {response.status}: {answer}")
        return answer

    found = json.dumps(ask())
    if str(HTTP_TOKENS) not in found:
        raise LmkvError(f"POST /lookup of {HTTP_TOKENS} tokens found {found}")
    looked_up, parsed = timing.in_turns([ask, lambda: json.loads(body)], 10 if run.quick else 200)
    values = [1e3 * statistics.median(seconds) for seconds in (looked_up, parsed)]
    run.add(compare(f"http_lookup_{HTTP_TOKENS}_ms", values[0], "ms", "json.loads of the body", values[1]))
    connection.close()


async def _in_turns(count: int, *acts: tuple[Ask, Callable[[], Any]]) -> list[list[float]]:
    """Durations of calls of each act, given with the function for its request, in turns. Drops the first ones."""
    seconds: list[list[float]] = [[] for _ in acts]
    for _ in range(count + WARM_UP_CALLS):
        for (ask, make_request), taken in zip(acts, seconds, strict=True):
            request = make_request()
            started = time.perf_counter()
            await ask(request)
            taken.append(time.perf_counter() - started)
    return [taken[WARM_UP_CALLS:] for taken in seconds]


def _milliseconds(seconds: Sequence[float], percent: int) -> float:
    return 1e3 * timing.percentile(seconds, percent)


def _add_percentiles(
    run: BenchmarkRun, name: str, seconds: Sequence[float], baseline: str, baseline_seconds: Sequence[float]
) -> None:
    for percent in (50, 99):
        value, beside = _milliseconds(seconds, percent), _milliseconds(baseline_seconds, percent)
        run.add(compare(f"{name}_p{percent}_ms", value, "ms", baseline, beside))
