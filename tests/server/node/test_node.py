"""Whole nodes: `lmkv node` as a process, and nodes that find chunks at each other through a coordinator."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.errors import ConfigError, LmkvError
from lmkv.keys import join_keys
from lmkv.v1 import cache_service_pb2_grpc, chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import ClearRequest, ClearResult, LookupRequest, MoveRequest, MoveResult, PinRequest
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations.clears import BATCH_CHUNKS
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key, chunk_keys, small_spec
from tests.server.node.engine_client import EngineClient, absent_count
from tests.waiting import WAIT_SECONDS, eventually, rests, until, wait_until

SPEC = small_spec()
SIZE = "16MB"


class NodeProcess:
    """One `lmkv node`, with its sockets and its output in `folder` unless told otherwise."""

    def __init__(self, folder: Path, flags: Sequence[str], settings: Mapping[str, str]) -> None:
        values = {"instance_id": "n", "runtime_dir": str(folder), "max_local_cpu_size": SIZE, "enable_p2p": "false"}
        values |= settings
        self.config = NodeConfig(**values)  # type: ignore[arg-type]  # as people write them
        self.socket = self.config.engine_socket
        self._log = folder / f"{time.monotonic_ns()}.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        environment |= {f"LMKV_{name.upper()}": value for name, value in values.items()}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmkv", "node", *flags], env=environment, stdout=output, stderr=output
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ready(self) -> NodeProcess:
        """Waits until engines can attach."""
        wait_until(lambda: listens(self.socket) or self.process.poll() is not None, "the node listens")
        assert self.process.poll() is None, self.output
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals, and waits for the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self, seconds: float = WAIT_SECONDS) -> int:
        return self.process.wait(seconds)

    def refusal(self) -> str:
        """The one line of a node that could not start as configured."""
        assert self.exit_code(WAIT_SECONDS) == 2, self.output
        (line,) = [line for line in self.output.splitlines() if line.startswith("lmkv: error: ")]
        assert "Traceback" not in self.output
        return line


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


StartNode = Callable[..., NodeProcess]


@pytest.fixture
def start_node(runtime_dir: Path) -> Iterator[StartNode]:
    """Starts `lmkv node` processes, and kills them in the end."""
    started: list[NodeProcess] = []

    def start(*flags: str, **settings: str) -> NodeProcess:
        started.append(NodeProcess(runtime_dir, flags, settings))
        return started[-1]

    yield start
    for node in started:
        node.process.kill()
        node.process.wait()


# ---- start and end of the process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_node_that_is_told_to_end_leaves_nothing(start_node: StartNode, number: signal.Signals) -> None:
    node = start_node().ready()
    assert is_locked(node.config.lock_path)
    assert node.stop(number) == 0, node.output
    assert not node.socket.exists()
    assert not node.config.pool_socket.exists()
    assert not is_locked(node.config.lock_path)
    assert "Traceback" not in node.output
    assert "ERROR" not in node.output
    assert re.search(rf"stopping: {number.name} from process {os.getpid()} \('.+'\), user {os.getuid()}", node.output)


def test_a_signal_that_is_ignored_when_a_node_starts_does_not_end_it(start_node: StartNode) -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        node = start_node().ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    node.process.send_signal(signal.SIGHUP)
    assert node.stop() == 0
    assert "SIGHUP" not in node.output
    assert "stopping: SIGTERM" in node.output


def test_a_node_ends_while_an_engine_is_attached(start_node: StartNode) -> None:
    node = start_node().ready()

    async def attached() -> None:
        async with EngineClient(node.socket) as engine:
            await engine.reserve(3)
            node.process.terminate()
            error = await engine.ending()
            assert error is not None
            assert error.reason == "UNREACHABLE"

    asyncio.run(attached())
    assert node.exit_code() == 0, node.output
    assert "Traceback" not in node.output


def test_a_node_that_was_killed_can_be_started_again_at_once(start_node: StartNode) -> None:
    node = start_node().ready()
    node.stop(signal.SIGKILL)
    assert node.socket.exists(), "what a killed node leaves behind"
    again = start_node().ready()
    assert again.stop() == 0
    assert not again.socket.exists()


def test_a_second_node_of_the_same_id_is_refused_and_the_first_serves_on(start_node: StartNode) -> None:
    first = start_node().ready()
    line = start_node().refusal()
    assert "instance_id: 'n' is already run by process" in line
    assert str(first.process.pid) in line
    assert listens(first.socket)
    assert first.stop() == 0


def test_a_port_in_use_is_refused_by_its_key(start_node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = start_node(enable_p2p="true", p2p_port=str(port)).refusal()
    assert f"p2p_port: cannot listen on 127.0.0.1:{port}" in line


def test_more_memory_than_there_is_is_refused_by_its_key(start_node: StartNode) -> None:
    assert "max_local_cpu_size: " in start_node(max_local_cpu_size="500000").refusal()


def test_an_unknown_flag_is_refused_with_a_suggestion(start_node: StartNode) -> None:
    line = start_node("--max-local-cpu-sice", "5").refusal()
    assert "--max-local-cpu-sice" in line
    assert "--max-local-cpu-size" in line


def test_an_unknown_variable_is_refused_by_its_name(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_local_cpu: 5\n")
    line = start_node("--config", str(file)).refusal()
    assert "unknown key max_local_cpu" in line


def test_a_path_too_long_for_sockets_is_refused_by_its_key(runtime_dir: Path) -> None:
    long = runtime_dir / ("x" * 90)
    command = [sys.executable, "-m", "lmkv", "node", "--runtime-dir", str(long), "--enable-p2p", "false"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert ended.returncode == 2
    assert "runtime_dir makes the socket path" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_pool_on_a_file_system_has_no_name_there(start_node: StartNode, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    node = start_node(pool_path=str(path)).ready()
    assert not path.exists()
    assert node.stop() == 0


def test_a_node_that_nobody_needs_ends_by_itself(start_node: StartNode) -> None:
    node = start_node("--linger", node_linger="0.3").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            await asyncio.sleep(1.0)  # longer than it would linger
            assert node.process.poll() is None, "an engine needs it"

    asyncio.run(attached())
    assert node.exit_code() == 0, node.output
    assert not node.socket.exists()


def test_a_node_without_linger_stays(start_node: StartNode) -> None:
    node = start_node(node_linger="0").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            pass

    asyncio.run(attached())
    wait_until(lambda: rests(lambda: cpu_seconds(node.process.pid)))
    assert node.process.poll() is None
    assert node.stop() == 0


def test_with_no_linger_at_all_a_node_waits_for_its_first_engine_and_rests_meanwhile(start_node: StartNode) -> None:
    node = start_node("--linger", node_linger="0").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            rested = partial(rests, lambda: cpu_seconds(node.process.pid))
            await asyncio.to_thread(wait_until, rested, "it does not spin")

    asyncio.run(attached())
    assert node.exit_code() == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_node_uses_no_processor_while_nobody_wants_anything(start_node: StartNode) -> None:
    node = start_node(enable_p2p="true").ready()
    wait_until(lambda: rests(lambda: cpu_seconds(node.process.pid), 2.0), "it rests once the pool is resident")
    assert node.stop() == 0


async def test_two_nodes_of_one_id_in_a_fleet_are_told_apart_at_the_start(
    start_node: StartNode, runtime_dir: Path
) -> None:
    other = runtime_dir / "other"
    other.mkdir()
    async with Coordinator(port=0) as coordinator:
        fleet = {"enable_p2p": "true", "coordinator_address": coordinator.address}
        first = start_node(**fleet)
        await asyncio.to_thread(first.ready)
        second = start_node(runtime_dir=str(other), **fleet)
        assert "instance_id" in await asyncio.to_thread(second.refusal)
        assert listens(first.socket)
        assert await asyncio.to_thread(first.stop) == 0


# ---- in this process


async def test_a_node_that_fails_to_start_leaves_nothing_behind(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = node_config(runtime_dir, "n", p2p_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="p2p_port"):
            await Node(config).__aenter__()
    assert not is_locked(config.lock_path)
    async with Node(node_config(runtime_dir, "n")):
        assert is_locked(config.lock_path)


async def test_a_node_may_be_started_anew_in_one_process(runtime_dir: Path) -> None:
    epochs = []
    for _ in range(3):
        async with Node(node_config(runtime_dir, "n", enable_p2p=False)) as node:
            epochs.append(node.epoch)
            async with EngineClient(node) as engine:
                await engine.store(chunk_keys(0))
    assert epochs == sorted(set(epochs))


async def test_a_node_knows_how_long_nobody_was_there(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "n", enable_p2p=False, node_linger=0.2)) as node:
        async with EngineClient(node):
            lingering = asyncio.create_task(node.linger())
            await asyncio.sleep(0.6)  # longer than that
            assert not lingering.done()
        async with asyncio.timeout(WAIT_SECONDS):
            await lingering


def node_config(runtime_dir: Path, instance_id: str, **settings: object) -> NodeConfig:
    values: dict[str, object] = {"max_local_cpu_size": SIZE, "runtime_dir": str(runtime_dir)}
    return NodeConfig(instance_id=instance_id, **(values | settings))  # type: ignore[arg-type]


class Fleet:
    """A coordinator and two nodes, each with an engine of the same spec."""

    def __init__(self, runtime_dir: Path, **holder_settings: object) -> None:
        self._runtime_dir = runtime_dir
        self._holder_settings = holder_settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        self.coordinator = await self._stack.enter_async_context(Coordinator(port=0))
        self.holder_stack = await self._stack.enter_async_context(AsyncExitStack())
        self.holder = await self.holder_stack.enter_async_context(self._node("holder", **self._holder_settings))
        self.asker = await self._stack.enter_async_context(self._node("asker"))
        self.storing = await self.holder_stack.enter_async_context(EngineClient(self.holder, "storing"))
        self.asking = await self._stack.enter_async_context(EngineClient(self.asker, "asking"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _node(self, instance_id: str, **settings: object) -> Node:
        address = (self.coordinator.address,)
        return Node(node_config(self._runtime_dir, instance_id, coordinator_address=address, **settings))

    async def store(self, numbers: list[int]) -> None:
        """Chunks at the holder whose every word is their number; waits until the asker can know of them."""
        credits_ = await self.storing.reserve(len(numbers))
        commits = []
        for number, extent in zip(numbers, credits_, strict=True):
            words(self.holder, extent.offset)[:] = number
            right = checksum(self.holder.pool.buffer, extent.offset, SPEC.chunk_bytes)
            commits.append(self.storing.commit(chunk_key(number), extent, checksum=right))
        await self.storing.say(commits=commits)
        if not self.holder.peer_address:
            return
        request = pb.EngineServiceLookupRequest(
            fingerprint=SPEC.fingerprint, chunk_keys=join_keys(chunk_keys(*numbers))
        )

        async def known() -> int:
            return absent_count(await self.asking.stub.Lookup(request, timeout=5.0))

        await eventually(known, len(numbers))

    async def load(
        self, ticket: str, first_chunk: int, chunk_count: int, timeout_seconds: int = 5
    ) -> tuple[list[pb.LoadedChunks], LmkvError]:
        """All that the asker says about a load until it is over."""
        load = pb.LoadChunks(request_id=ticket, first_chunk=first_chunk, chunk_count=chunk_count)
        load.timeout.FromSeconds(timeout_seconds)
        await self.asking.say(loads=[load])
        heard: list[pb.LoadedChunks] = []
        while not heard or not heard[-1].done:
            heard += await self.asking.hear("loaded")
        return heard, rpc.from_status(heard[-1].status)


def words(node: Node, offset: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(node.pool.buffer, np.uint64, SPEC.chunk_bytes // 8, offset)


@pytest.fixture
async def fleet(runtime_dir: Path) -> AsyncIterator[Fleet]:
    async with Fleet(runtime_dir) as fleet:
        yield fleet


async def test_a_node_without_transfers_is_in_the_fleet_and_nothing_is_fetched_from_it(runtime_dir: Path) -> None:
    keys = chunk_keys(0, 1, 2)
    async with (
        Fleet(runtime_dir, enable_p2p=False) as fleet,
        rpc.open_channel(fleet.coordinator.address) as channel,
    ):
        await fleet.store([0, 1, 2])
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)

        async def held() -> list[tuple[str, int, str]]:
            found = await cache.Lookup(LookupRequest(chunk_keys=join_keys(keys)), timeout=WAIT_SECONDS)
            return [(one.instance_id, one.matched_chunk_count, one.peer_address) for one in found.holders]

        await eventually(held, [("holder", 3, "")])
        found = await fleet.asking.lookup("1", keys)
        assert (len(found.own), absent_count(found)) == (0, 0)
        assert len((await fleet.storing.lookup("2", keys)).own) == 3
        for ends in (("holder", "asker"), ("asker", "holder")):
            old, new = (chunk_pb2.Position(instance_id=end) for end in ends)
            with pytest.raises(grpc.RpcError) as caught:
                await cache.Move(
                    MoveRequest(old_position=old, new_position=new, chunk_keys=join_keys(keys)), timeout=WAIT_SECONDS
                )
            error = rpc.from_rpc_error(caught.value)
            assert error.reason == "P2P_DISABLED"
            assert "set enable_p2p to true there" in str(error)
        position = chunk_pb2.Position(instance_id="holder")
        pin = (await cache.Pin(PinRequest(position=position, chunk_keys=join_keys(keys)), timeout=WAIT_SECONDS)).pin
        assert pin.chunk_count == 3


async def test_what_another_node_holds_is_found_and_brought_in(fleet: Fleet) -> None:
    await fleet.store([0, 1, 2, 3])
    found = await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3, 4), reserve_count=5)
    assert (len(found.own), absent_count(found), found.peer_instance_id) == (0, 4, "holder")
    assert len(await fleet.asking.hear("credits")) == 1, "each chunk that is found makes it one fewer"

    heard, _ = await fleet.load("1", 0, 4)
    assert not heard[-1].status.code
    assert heard[-1].peer_instance_id == "holder"
    assert sum(loaded.transferred_bytes for loaded in heard) == 4 * SPEC.chunk_bytes
    extents = {loaded.first_chunk + index: extent for loaded in heard for index, extent in enumerate(loaded.extents)}
    assert sorted(extents) == [0, 1, 2, 3]
    for number, extent in extents.items():
        assert (words(fleet.asker, extent.offset) == number).all()
    assert [chunk.holds for chunk in fleet.asker.tier] == [1] * 4
    await fleet.asking.release("1")
    assert len((await fleet.asking.lookup("2", chunk_keys(0, 1, 2, 3))).own) == 4
    await fleet.asking.release("2")
    await fleet.asking.lookup("3", chunk_keys(9))
    assert not any(chunk.holds for node in (fleet.asker, fleet.holder) for chunk in node.tier)


async def test_a_load_may_begin_behind_what_is_there_already(fleet: Fleet) -> None:
    await fleet.store([0, 1, 2, 3])
    await fleet.asking.store(chunk_keys(0))
    found = await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3))
    assert (len(found.own), absent_count(found)) == (1, 3)
    heard, _ = await fleet.load("1", 2, 2)
    assert next(loaded.first_chunk for loaded in heard if loaded.extents) == 2
    values = {int(words(fleet.asker, extent.offset)[0]) for loaded in heard for extent in loaded.extents}
    assert values == {2, 3}


async def test_a_load_that_is_released_brings_nothing_more_and_holds_nothing(fleet: Fleet) -> None:
    await fleet.store([0, 1, 2, 3])
    await fleet.asking.lookup("1", chunk_keys(0, 1, 2, 3))
    load = pb.LoadChunks(request_id="1", first_chunk=0, chunk_count=4)
    load.timeout.FromSeconds(5)
    await fleet.asking.say(loads=[load], releases=[])
    await fleet.asking.release("1")
    await fleet.asking.lookup("2", chunk_keys(9))
    await until(lambda: not any(chunk.holds for node in (fleet.asker, fleet.holder) for chunk in node.tier))
    fleet.asker.tier.check()


async def test_when_the_holder_is_gone_the_load_says_so_in_time(fleet: Fleet) -> None:
    await fleet.store([0, 1])
    await fleet.asking.lookup("1", chunk_keys(0, 1))
    await fleet.holder_stack.aclose()
    async with asyncio.timeout(WAIT_SECONDS):  # far less than the load may take
        heard, error = await fleet.load("1", 0, 2, timeout_seconds=600)
    assert heard[-1].status.code
    assert error.reason == "UNREACHABLE"
    assert not any(loaded.extents for loaded in heard)
    assert fleet.asker.tier.reserved_count == 0


async def test_a_person_may_have_chunks_brought_in(fleet: Fleet) -> None:
    await fleet.store([0, 1])
    request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=join_keys(chunk_keys(0, 1, 2)))
    answer = await fleet.asking.stub.Load(request, timeout=10.0)
    assert (answer.chunk_count, answer.transferred_bytes) == (2, 2 * SPEC.chunk_bytes)
    assert not any(chunk.holds for chunk in fleet.asker.tier)


async def clear(coordinator: Coordinator, **selection: Any) -> ClearResult:
    """Clears, and waits for the end."""
    async with rpc.open_channel(coordinator.address) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        operations: Any = operations_pb2_grpc.OperationsStub(channel)
        operation = await cache.Clear(ClearRequest(**selection), timeout=WAIT_SECONDS)
        operation = await operations.WaitOperation(
            operations_pb2.WaitOperationRequest(name=operation.name), timeout=WAIT_SECONDS
        )
    result = ClearResult()
    assert operation.response.Unpack(result), operation.error.message
    return result


async def test_a_clear_of_more_chunks_than_one_order_names_drops_all_of_them(fleet: Fleet) -> None:
    await fleet.store([0, 1, 2])
    nowhere = chunk_keys(*range(1000, 1000 + BATCH_CHUNKS))
    keys = join_keys([chunk_key(0), *nowhere, chunk_key(1), *nowhere, chunk_key(2)])
    result = await clear(fleet.coordinator, chunk_keys=keys)
    assert (result.chunk_count, len(result.failures)) == (3, 0)
    assert len(fleet.holder.tier) == 0


async def test_a_clear_of_a_model_with_two_specs_drops_the_chunks_of_both(fleet: Fleet) -> None:
    other = small_spec(chunk_size=64)
    async with EngineClient(fleet.holder, "other", other) as second:
        await second.store(chunk_keys(10, 11))
        await fleet.store([0, 1])
        assert len(fleet.holder.tier) == 4
        await until(lambda: len(fleet.coordinator.tenants.unnamed.core.instances.named("holder", "").info.specs) == 2)
        result = await clear(fleet.coordinator, model_name=SPEC.model_name)
        assert (result.chunk_count, len(result.failures)) == (4, 0)
        assert len(fleet.holder.tier) == 0


async def test_without_the_coordinator_the_own_chunks_are_still_found(fleet: Fleet) -> None:
    await fleet.asking.store(chunk_keys(7))
    await fleet.coordinator.aclose()
    found = await fleet.asking.lookup("1", chunk_keys(7, 8))
    assert len(found.own) == 1


async def test_the_fleet_is_told_what_each_node_is(fleet: Fleet) -> None:
    described = fleet.holder.describe()
    assert (described.instance_id, described.engine_count) == ("holder", 1)
    assert described.peer_address == fleet.holder.peer_address
    assert [spec.fingerprint for spec in described.specs] == [SPEC.fingerprint]
    (usage,) = described.tiers
    assert usage.capacity_bytes == fleet.holder.tier.size_bytes


async def test_the_fleet_is_told_how_often_chunks_were_found_and_where_they_came_from(fleet: Fleet) -> None:
    await fleet.store([0, 1])
    await fleet.asking.store(chunk_keys(7))
    await fleet.asking.lookup("own", chunk_keys(7, 8))
    found = await fleet.asking.lookup("peer", chunk_keys(0, 1, 2))
    assert absent_count(found) == 2
    await fleet.load("peer", 0, 2)
    stats = fleet.asker.describe().stats
    assert (stats.asked_chunks, stats.own_chunks, stats.peer_chunks) == (5, 1, 2)
    (traffic,) = stats.traffic
    assert (traffic.instance_id, traffic.chunk_count) == ("holder", 2)
    assert traffic.transferred_bytes == 2 * SPEC.chunk_bytes


async def test_what_the_coordinator_wants_done_is_done_by_whole_nodes(fleet: Fleet) -> None:
    await fleet.store([0, 1, 2, 3])
    keys = join_keys(chunk_keys(0, 1, 2, 3))
    async with rpc.open_channel(fleet.coordinator.address) as channel:
        cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
        operations: Any = operations_pb2_grpc.OperationsStub(channel)
        here, there = chunk_pb2.Position(instance_id="asker"), chunk_pb2.Position(instance_id="holder")
        pin = await cache.Pin(PinRequest(position=there, chunk_keys=keys[:16], ttl=Duration(seconds=60)), timeout=5)
        assert pin.pin.chunk_count == 1
        move = await cache.Move(MoveRequest(old_position=there, new_position=here, chunk_keys=keys), timeout=5)
        move = await operations.WaitOperation(operations_pb2.WaitOperationRequest(name=move.name), timeout=10)
    result = MoveResult()
    assert move.response.Unpack(result)
    assert (result.chunk_count, result.dropped_chunk_count) == (4, 3)
    assert result.transferred_bytes == 4 * SPEC.chunk_bytes
    assert rpc.from_status(result.failures[0].status).reason == "CHUNK_PINNED"
    for number in range(4):
        chunk = fleet.asker.tier.get(chunk_key(number))
        assert chunk
        assert (words(fleet.asker, chunk.offset) == number).all()
    assert [chunk.key for chunk in fleet.holder.tier] == chunk_keys(0)
    for node in (fleet.asker, fleet.holder):
        node.orders.check()
        node.tier.check()
