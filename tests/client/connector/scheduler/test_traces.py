"""One request's trace over real processes: engine, two nodes, coordinator; as a real OTLP receiver sees it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmkv import rpc, telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import KeyChain, as_tokens, root_key
from lmkv.rpc.messages import by_tokens
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import MoveRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from lmkv_client.connector.engine_kv import EngineKv, LayerGroup
from lmkv_client.connector.messages import LoadResult, WorkerReport
from lmkv_client.connector.scheduler.side import SchedulerSide
from lmkv_client.connector.scheduler.stores import SchedulerOptions
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import ServerProcess
from lmkv_client.engine.node.client import NodeClient
from lmkv_kernels import checksum
from tests.client.engine.nodes import until
from tests.lmkv.telemetry.receiver import Received, Receiver, receiving
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

SPEC = small_spec()
GROUP = LayerGroup(part=0, block_size=SPEC.block_size, layer_names=("layer",))
ENGINE_KV = EngineKv(spec=SPEC, groups=(GROUP,), hash_block_size=GROUP.block_size)
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
CHUNKS = 3
TOKENS = [number % 900 + 2 for number in range(CHUNKS * SPEC.chunk_size + 5)]
KEYS = KeyChain(root_key(SPEC.fingerprint), SPEC.chunk_size)
KEYS.extend(as_tokens(TOKENS))
LOOKUP, ACQUIRE = "lmkv.internal.v1.LookupService/Lookup", "lmkv.v1.PeerService/Acquire"
MOVE = "lmkv.v1.CacheService/Move"
LONG = 30.0
ENDING_SECONDS = 15.0
"""Less than an exporter's own patience with an endpoint, twice; more than a busy machine needs."""


class Fleet:
    """A coordinator and two nodes as processes, and a scripted engine at one of them."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._stack = ExitStack()
        self.coordinator = CoordinatorProcess(folder)
        self.coordinator.environment |= environment

    def __enter__(self) -> Fleet:
        try:
            self._start_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start_all(self) -> None:
        self._stack.enter_context(self.coordinator)
        self.holder, self.asker = self._config("holder"), self._config("asker")
        nodes = [self._start(config) for config in (self.holder, self.asker)]
        self.processes = [self.coordinator, *nodes]
        until(lambda: len(self.coordinator.instances()) == 2)
        link = NodeClient(self.asker, SPEC, 1)
        link.start()
        self._stack.callback(link.close)
        self.engine = SchedulerSide(self.asker, ENGINE_KV, link, SchedulerOptions(rank_count=1, step_tokens=2048))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _config(self, name: str) -> ConnectorConfig:
        node = ConnectorConfig(
            instance_id=name,
            runtime_dir=str(self._folder),
            max_local_cpu_size="16MB",  # type: ignore[arg-type]  # as people write it
            coordinator_address=(self.coordinator.address,),
            coordinator_timeout=LONG,
            chunk_size=SPEC.chunk_size,
            lookup_timeout=LONG,
            load_timeout=LONG,
            save_partial_chunks=False,
        )
        return ConnectorConfig(**(vars(node) | {"node_address": str(node.engine_socket)}))

    def _start(self, config: ConnectorConfig) -> ServerProcess:
        names = ("instance_id", "runtime_dir", "coordinator_timeout")
        settings = {f"LMKV_{name.upper()}": str(getattr(config, name)) for name in names}
        settings["LMKV_COORDINATOR_ADDRESS"] = self.coordinator.address
        process = ServerProcess(
            config.instance_id,
            [sys.executable, "-m", "lmkv", "node", "--max-local-cpu-size", "16MB", "--log-format", "json"],
            self._folder / f"{config.instance_id}.log",
            settings | self._environment,
        )
        self._stack.callback(process.stop)
        process.start()
        process.wait_until(config.engine_socket.exists, "ready", 30.0)
        return process

    async def store(self) -> None:
        """Chunks of zeros at the holder; returns when the coordinator knows of them."""
        async with EngineClient(self.holder.engine_socket) as engine:
            sum_ = checksum(np.zeros(SPEC.chunk_bytes, np.uint8), 0, SPEC.chunk_bytes)
            extents = await engine.reserve(CHUNKS)
            await engine.say(
                commit=[engine.commit(key, one, checksum=sum_) for key, one in zip(KEYS.keys, extents, strict=True)]
            )
            until(lambda: self.coordinator.holders(TOKENS) == {"holder": CHUNKS * SPEC.chunk_size})

    def load(self, request_id: str, headers: dict[str, str] | None) -> None:
        """One request that loads all chunks, as vLLM would have it."""
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({}, 1)
        request = Request(request_id, TOKENS, params, None, trace_headers=headers)
        self.engine.drain_events()
        self.engine.on_new_request(request)
        found: tuple[int | None, bool] = (None, False)

        def is_found() -> bool:
            nonlocal found
            found = self.engine.matched_tokens(request, 0)
            return found[0] is not None

        until(is_found)
        assert found[0] == CHUNKS * SPEC.chunk_size
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (list(range(20)),))
        self.engine.allocated(request, blocks, CHUNKS * SPEC.chunk_size)
        until(lambda: any(load.final for load in self.engine.plan(NOTHING_SCHEDULED).loads))
        assert self.engine._session.attachment is not None
        loaded = LoadResult(rank_count=1, size_bytes=CHUNKS * SPEC.chunk_bytes, seconds=0.001)
        report = WorkerReport(engine_id=self.engine._session.attachment.engine_id, loaded={request_id: loaded})
        self.engine.handle_report(KVConnectorOutput(kv_connector_worker_meta=report))
        self.engine.finished(request, ([],))


NOTHING_SCHEDULED: SchedulerOutput = SchedulerOutput.make_empty()

MakeFleet = Callable[[dict[str, str]], Fleet]


@pytest.fixture
def make_fleet(short_folder: Path) -> Iterator[MakeFleet]:
    """Starts a fleet whose processes have these variables besides."""
    with ExitStack() as stack:
        yield lambda environment: stack.enter_context(Fleet(short_folder, environment))


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that this process exports to."""
    with receiving() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


async def test_a_request_is_one_trace_over_lookup_fetch_and_load(exporting: Receiver, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(exporting.environment)
    await fleet.store()
    with telemetry.trace_process("lmkv-connector", "engine"):
        fleet.load("traced", HEADERS)

    def span(service: str, name: str, **fields: str) -> Received:
        return exporting.span(service, name, trace_id=TRACE_ID, **fields)

    lookup, load = span("lmkv-connector", "lmkv.lookup"), span("lmkv-connector", "lmkv.load")
    node_lookup, fetch = span("lmkv-node", "lmkv.lookup"), span("lmkv-node", "lmkv.fetch")
    asked, answered = span("lmkv-node", LOOKUP), span("lmkv-coordinator", LOOKUP)
    acquiring = span("lmkv-node", ACQUIRE, instance_id="asker")
    acquired = span("lmkv-node", ACQUIRE, instance_id="holder")
    for child, parent_id in (
        (lookup, PARENT_ID),
        (node_lookup, lookup.span_id),
        (asked, node_lookup.span_id),
        (answered, asked.span_id),
        (load, PARENT_ID),
        (fetch, load.span_id),
        (acquiring, fetch.span_id),
        (acquired, acquiring.span_id),
    ):
        assert (child.parent_id, child.failed) == (parent_id, False), child
    tokens, size_bytes = CHUNKS * SPEC.chunk_size, CHUNKS * SPEC.chunk_bytes
    assert lookup.attributes == {
        "lmkv.asked_tokens": len(TOKENS),
        "lmkv.own_tokens": 0,
        "lmkv.peers_tokens": tokens,
        "lmkv.peer_instance_id": "holder",
    }
    assert fetch.attributes == {
        "lmkv.asked_chunks": CHUNKS,
        "lmkv.arrived_chunks": CHUNKS,
        "lmkv.transferred_bytes": size_bytes,
        "lmkv.peer_instance_ids": ("holder",),
    }
    assert load.attributes == {
        "lmkv.asked_tokens": tokens,
        "lmkv.loaded_tokens": tokens,
        "lmkv.loaded_bytes": size_bytes,
        "lmkv.peers_tokens": tokens,
        "lmkv.peer_instance_id": "holder",
    }


async def test_a_request_without_trace_headers_is_a_trace_of_its_own(
    exporting: Receiver, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(exporting.environment)
    await fleet.store()
    with telemetry.trace_process("lmkv-connector", "engine"):
        fleet.load("plain", None)
    lookup = exporting.span("lmkv-connector", "lmkv.lookup")
    assert lookup.parent_id == ""
    for service, name in (("lmkv-connector", "lmkv.load"), ("lmkv-node", "lmkv.lookup")):
        assert exporting.span(service, name, trace_id=lookup.trace_id).parent_id == lookup.span_id


async def test_coordinator_and_nodes_export_what_they_count(exporting: Receiver, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(exporting.environment)
    await fleet.store()
    fleet.load("counted", None)
    name = "lmkv_node_tier_read_chunks"
    fetched = exporting.metric("lmkv-node", name, "asker", lambda metric: value(metric) == CHUNKS)
    assert fetched.sum.is_monotonic
    for service in ("lmkv-node", "lmkv-coordinator"):
        assert exporting.metric(service, "rpc.server.call.duration").unit == "s"
        assert exporting.metric(service, "process.memory.usage").unit == "By"
    exporting.metric("lmkv-coordinator", "lmkv_coordinator_lookup_hits", enough=lambda metric: value(metric) > 0)


def value(metric: Any) -> float:
    """The number that a counter of one series has reached."""
    (point,) = metric.sum.data_points
    return float(point.as_double)


async def test_an_endpoint_that_does_not_answer_delays_nothing(
    make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)  # connects, and never says a word
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{dead.getsockname()[1]}",
            "OTEL_BSP_SCHEDULE_DELAY": "10",
            "OTEL_METRIC_EXPORT_INTERVAL": "10",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        fleet = make_fleet(environment)
        await fleet.store()
        with telemetry.trace_process("lmkv-connector", "engine"):
            for number in range(20):
                fleet.load(f"untold-{number}", HEADERS)
        for process in fleet.processes:
            process.request_stop()
            until(lambda process=process: not process.alive, timeout_seconds=ENDING_SECONDS)  # type: ignore[misc]


async def test_the_logs_of_a_node_are_json_with_its_ids(make_fleet: MakeFleet) -> None:
    fleet = make_fleet({})
    records = [json.loads(line) for line in fleet.processes[-1].log().splitlines()]
    assert {"lmkv-node"} == {record["service"] for record in records}
    assert {"asker"} == {record["instance_id"] for record in records}
    assert any("ready" in record["message"] for record in records)


async def test_a_move_is_one_trace_from_the_call_to_the_peer_that_gives_the_bytes(
    exporting: Receiver, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(exporting.environment)
    await fleet.store()
    async with EngineClient(fleet.asker.engine_socket):  # so that the destination knows the spec
        with telemetry.trace_process("tool", ""), telemetry.begin("click", parent=HEADERS["traceparent"]) as click:
            async with rpc.open_channel(fleet.coordinator.address) as channel:
                request = MoveRequest(
                    prompt=by_tokens(TOKENS),
                    old_position=Position(instance_id="holder", tier=HOST),
                    new_position=Position(instance_id="asker", tier=HOST),
                    copy=True,
                )
                stub = CacheServiceStub(channel)
                booked = await rpc.call(stub.Move, MOVE, fleet.coordinator.address, request, LONG)
            clicked = click.traceparent

    def span(service: str, name: str, **fields: str) -> Received:
        return exporting.span(service, name, trace_id=TRACE_ID, **fields)

    calling, called = span("tool", MOVE), span("lmkv-coordinator", MOVE)
    operation = span("lmkv-coordinator", "lmkv.copy")
    given, taken = span("lmkv-coordinator", "lmkv.order"), span("lmkv-node", "lmkv.order")
    acquiring = span("lmkv-node", ACQUIRE, instance_id="asker")
    for child, parent_id in (
        (calling, clicked.split("-")[2]),
        (called, calling.span_id),
        (operation, called.span_id),
        (given, operation.span_id),
        (taken, given.span_id),
        (acquiring, taken.span_id),
    ):
        assert (child.parent_id, child.failed) == (parent_id, False), child
    assert operation.attributes["lmkv.operation_id"] == booked.name
    assert (given.attributes["lmkv.instance_id"], given.attributes["lmkv.action"]) == ("asker", "fetch")
    log, order_id = fleet.processes[-1].log, str(taken.attributes["lmkv.order_id"])
    until(lambda: order_id in log())
    records = [record for record in map(json.loads, log().splitlines()) if record.get("order_id") == order_id]
    assert sum(f"order {order_id}: fetch from holder" in record["message"] for record in records) == 1
