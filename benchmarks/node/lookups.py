"""Lookups by an engine at its node and by clients at the coordinator, and their keys."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.support import timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row, compare
from lmkv import rpc
from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, Tokens, chunk_keys, join_keys, root_key
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv_client.demo.cluster import CoordinatorProcess
from tests.support.nodes import NodeProcesses

if TYPE_CHECKING:
    from lmkv_client.engine.attachment import Attachment
    from lmkv_client.engine.node.client import NodeClient

CHUNK_COUNTS = {40: "", 400: "_400"}
"""Chunks in a prompt, and what rows of that length end with."""
PAUSE_SECONDS = 0.002
"""Pause between lookups: in production they are not back to back, and the responding process sleeps in between."""
WARM_UP_CALLS = 10
ANSWER_SECONDS = 5.0

SPEC = KvSpec(
    model_name="lookups",
    model_id="lookups",
    kv_dtype="bfloat16",
    layer_count=1,
    kv_head_count=1,
    head_size=8,
    chunk_size=256,
    format=NATIVE_TILES,
    tile_backend="NONE",
    block_size=128,
    vocab_size=128_256,
)
"""Its chunks are small, since none is read."""


def prompt(seed: int, chunk_count: int) -> list[ChunkKey]:
    """Keys of a random prompt of `chunk_count` chunks."""
    return chunk_keys(_tokens(seed, chunk_count), root_key(SPEC.fingerprint), SPEC.chunk_size)


def _tokens(seed: int, chunk_count: int) -> Tokens:
    random = np.random.default_rng(seed)
    return random.integers(0, SPEC.vocab_size, chunk_count * SPEC.chunk_size, dtype=np.uint32)


OWN, PEER, MISS = 1, 2, 3
"""Seeds of the prompts, by holder."""


def measure_keys(run: BenchmarkRun) -> None:
    """Adds the row for making the keys of a long prompt."""
    tokens = np.arange(100_000, dtype=np.uint32)
    root = root_key(SPEC.fingerprint)
    made, hashed = timing.in_turns(
        [lambda: chunk_keys(tokens, root, SPEC.chunk_size), lambda: hashlib.sha256(tokens.data).digest()], 200
    )
    milliseconds = [1e3 * statistics.median(seconds) for seconds in (made, hashed)]
    run.add(compare("keys_100k_tokens_ms", milliseconds[0], "ms", "one SHA-256 over the tokens", milliseconds[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupPair:
    """A coordinator and two nodes that an engine may ask."""

    coordinator: CoordinatorProcess
    first_socket: Path
    """Where engines reach the first node."""


@contextmanager
def filled_pair(run: BenchmarkRun) -> Iterator[LookupPair]:
    """Two nodes; what `OWN` stands for is held by the first, `PEER` by the second."""
    runtime_dir = run.folder / "nodes"
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    names = {OWN: "node-1", PEER: "node-2"}
    with (
        CoordinatorProcess(run.logs) as coordinator,
        NodeProcesses(
            list(names.values()),
            coordinator_address=coordinator.address,
            runtime_dir=runtime_dir,
            logs=run.logs,
            pool_size="64MiB",
        ) as nodes,
    ):
        count = max(CHUNK_COUNTS)
        for seed, name in names.items():
            asyncio.run(store(nodes.socket(name), seed))
            coordinator.wait_for_holder(_tokens(seed, count).tolist(), name, count * SPEC.chunk_size, 20.0)
        yield LookupPair(coordinator=coordinator, first_socket=nodes.socket(names[OWN]))


async def store(socket: Path, seed: int) -> None:
    """Commits the longest prompt of a seed at a node, as an engine does, but for the bytes."""
    keys = prompt(seed, max(CHUNK_COUNTS))
    async with rpc.open_channel(f"unix:{socket}") as channel:
        call: Any = engine_service_pb2_grpc.EngineServiceStub(channel).Attach()  # type: ignore[call-arg]
        hello = pb.Hello(engine_id=f"filler-{seed}", spec=SPEC.to_proto(), worker_count=1)
        await call.write(pb.AttachRequest(acts=[pb.Act(hello=hello)]))
        await call.read()
        while keys:
            wanted = pb.ReserveCredits(counts=[min(len(keys), 100)])
            await call.write(pb.AttachRequest(acts=[pb.Act(reserve=wanted)]))
            granted: list[Any] = []
            while not granted:
                granted = [one for event in (await call.read()).events for one in event.granted.credits]
            commits = [
                pb.CommitChunk(
                    chunk_key=key, offset=one.extent.offset, size_bytes=SPEC.chunk_bytes, token_count=SPEC.chunk_size
                )
                for key, one in zip(keys, granted, strict=False)
            ]
            del keys[: len(commits)]
            await call.write(pb.AttachRequest(acts=[pb.Act(commit=pb.CommitChunks(chunks=commits))]))
        await call.done_writing()
        while isinstance(await call.read(), pb.AttachResponse):
            pass


@contextmanager
def attached(socket: Path) -> Iterator[tuple[NodeClient, Attachment]]:
    """The connector's own line to a node, its inbox untouched. Raises `LmkvError` if the node is not there."""
    from lmkv_client.engine.attachment import Attachment
    from lmkv_client.engine.node.client import NodeClient  # it imports vLLM, for its log

    link = NodeClient(ConnectorConfig(node_address=str(socket)), SPEC, worker_count=1)
    link.start()
    try:
        attachment = link.inbox[0] if link.inbox else None
        if not isinstance(attachment, Attachment):
            raise LmkvError("the connector's line did not attach to the node; its log says why")
        yield link, attachment
    finally:
        link.close()


def measure_engine(run: BenchmarkRun, link: NodeClient, attachment: Attachment) -> None:
    """Adds rows for lookups as the connector's scheduler side makes them: over `Attach`, from its thread."""
    seeds = {OWN: "lookup", PEER: "lookup_peer", MISS: "lookup_miss"}
    count = 100 if run.quick else 2000
    for chunk_count, suffix in CHUNK_COUNTS.items():
        for seed, name in seeds.items():
            ask = EngineLookup(link, attachment, prompt(seed, chunk_count), f"{name}{suffix}")
            expected = {OWN: (chunk_count, 0), PEER: (0, chunk_count), MISS: (0, 0)}[seed]
            if (found := ask.once()) != expected:
                raise LmkvError(f"{name}: found {found} chunks, not {expected}")
            (seconds,) = samples(count, ask.once)
            _add_percentiles(run, f"{name}{suffix}", seconds)


class EngineLookup:
    """One prompt, looked up over and over."""

    def __init__(self, link: NodeClient, attachment: Attachment, keys: list[ChunkKey], name: str) -> None:
        self._link = link
        self._attachment = attachment
        self._keys = keys
        self._name = name
        self._number = 0

    def once(self) -> tuple[int, int]:
        """Looks it up; chunks of its own and of a peer. Raises `LmkvError` if no answer comes."""
        self._number += 1
        ticket = f"{self._name}-{self._number}"
        lookup = pb.LookupChunks(lookup_id=ticket, chunk_keys=join_keys(self._keys))
        self._link.send(self._attachment, pb.Act(lookup=lookup))
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            while self._link.inbox:
                event = self._link.inbox.popleft()
                for one in event.events if isinstance(event, pb.AttachResponse) else ():
                    if (found := one.found).lookup_id == ticket:
                        self._link.send(self._attachment, pb.Act(release=pb.ReleaseChunks(lookup_id=ticket)))
                        return len(found.own), sum(run.chunk_count for run in found.runs)
            self._link.wait(deadline - time.monotonic())
        raise LmkvError(f"the node did not answer {self._name} within {ANSWER_SECONDS:.0f} s")


def measure_coordinator(run: BenchmarkRun, address: str) -> None:
    """Adds rows for `CacheService.Lookup`, by keys and by tokens, against an RPC that does nothing."""
    count = 100 if run.quick else 2000
    with grpc.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) as channel:
        stub, health = CacheServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        for chunk_count, suffix in CHUNK_COUNTS.items():
            requests = {
                "cache_lookup": LookupRequest(prompt=by_keys(prompt(PEER, chunk_count))),
                "cache_lookup_miss": LookupRequest(prompt=by_keys(prompt(MISS, chunk_count))),
                "cache_lookup_tokens": LookupRequest(prompt=by_tokens(_tokens(PEER, chunk_count).tolist())),
            }
            for name, request in requests.items():
                looked_up, nothing = samples(
                    count,
                    partial(stub.Lookup, request, timeout=ANSWER_SECONDS),
                    lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS),
                )
                _add_percentiles(run, f"{name}{suffix}", looked_up, ("Health.Check", nothing))


def samples(count: int, *acts: Callable[[], object]) -> list[list[float]]:
    """Durations of calls of each act, in turns, with pauses. Drops the first ones, which warm up."""
    seconds: list[list[float]] = [[] for _ in acts]
    for number in range(count + WARM_UP_CALLS):
        for act, taken in zip(acts, seconds, strict=True):
            took = timing.seconds_of(act)
            if number >= WARM_UP_CALLS:
                taken.append(took)
            time.sleep(PAUSE_SECONDS)
    return seconds


def _add_percentiles(
    run: BenchmarkRun, name: str, seconds: list[float], baseline: tuple[str, list[float]] | None = None
) -> None:
    for percent in (50, 99):
        value = 1e3 * timing.percentile(seconds, percent)
        row_name = f"{name}_p{percent}_ms"
        if baseline:
            run.add(compare(row_name, value, "ms", baseline[0], 1e3 * timing.percentile(baseline[1], percent)))
        else:
            run.add(Row(name=row_name, value=value, unit="ms"))
