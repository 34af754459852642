"""Operations of coordinators that share a map: each shows those of all, and changes its own only. Real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2, json_format
from google.rpc import status_pb2

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import InstanceNotFound, LmkvError, OperationNotFound
from lmkv.keys import as_tokens, chunk_keys, root_key
from lmkv.v1 import cache_service_pb2 as pb
from lmkv_client import Coordinator
from lmkv_client.demo import cluster
from lmkv_kernels import checksum
from lmkv_server.coordinator.coordinator import Coordinator as CoordinatorServer
from lmkv_server.coordinator.operations import shared
from lmkv_server.coordinator.operations.operations import Operation, to_proto
from lmkv_server.coordinator.operations.shared import RecordSeal
from tests.server.node.engine_client import EngineClient
from tests.support.nodes import NodeProcesses
from tests.support.redis_server import RedisServer
from tests.support.specs import small_spec
from tests.waiting import WAIT_SECONDS, eventually

SPEC = small_spec()
CHUNK_COUNT = 5
TOKENS = list(range(CHUNK_COUNT * SPEC.chunk_size))
KEYS = chunk_keys(as_tokens(TOKENS), root_key(SPEC.fingerprint), SPEC.chunk_size)
FIRST, SECOND = "node-1", "node-2"
OWNER = "head-1:9000#0123456789abcdef"
NAME = "move-18af3c5d2e9b7f01"


class Fleet:
    """Two coordinators that share a map, and two nodes, the first of which holds a prompt."""

    def __init__(
        self, coordinators: list[cluster.CoordinatorProcess], nodes: NodeProcesses, server: RedisServer
    ) -> None:
        self.home, self.other = coordinators
        self.nodes = nodes
        self.server = server

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Stops a node's process meanwhile, so that operations that need it do not end."""
        os.kill(self.nodes.pid(name), signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.nodes.pid(name), signal.SIGCONT)

    async def lmkv(self, at: cluster.CoordinatorProcess, *arguments: str) -> tuple[int, str, str]:
        """Runs a command against one coordinator; returns its exit code and what it prints."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lmkv", *arguments, "--coordinator", at.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 2 * WAIT_SECONDS)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def fleet(tmp_path: Path, short_folder: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer())
        options = ["--lease-ttl", f"{WAIT_SECONDS:g}"]
        environment = {"LMKV_CLUSTER_SECRET": "hush", "LMKV_LAYOUT_MAP_URL": server.url}
        coordinators = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            process = cluster.CoordinatorProcess(folder, arguments=options, environment=environment)
            coordinators.append(stack.enter_context(process))
        nodes = stack.enter_context(
            NodeProcesses(
                (FIRST, SECOND),
                coordinator_address=",".join(each.address for each in coordinators),
                runtime_dir=short_folder,
                logs=tmp_path,
                pool_size="16MiB",
            )
        )
        engines = [
            await stack.enter_async_context(EngineClient(nodes.socket(name), spec=SPEC)) for name in (FIRST, SECOND)
        ]
        extents = await engines[0].reserve(CHUNK_COUNT)
        of_zeros = checksum(bytearray(SPEC.chunk_bytes), 0, SPEC.chunk_bytes)  # as fresh memory is
        await engines[0].say(
            commit=[engines[0].commit(key, one, checksum=of_zeros) for key, one in zip(KEYS, extents, strict=True)]
        )
        for each in coordinators:
            async with Coordinator(each.address) as coordinator:

                async def holders(coordinator: Coordinator = coordinator) -> dict[str, int]:
                    answer = await coordinator.lookup(keys=KEYS)
                    return {holder.instance_id: holder.matched_chunk_count for holder in answer.holders}

                await eventually(holders, {FIRST: CHUNK_COUNT})
        yield Fleet(coordinators, nodes, server)


async def states(at: cluster.CoordinatorProcess) -> dict[str, str]:
    async with Coordinator(at.address) as coordinator:
        return {operation.name: operation.state for operation in await coordinator.operations()}


async def test_each_coordinator_shows_what_the_other_runs_and_changes_nothing_of_it(fleet: Fleet) -> None:
    async with Coordinator(fleet.home.address) as home, Coordinator(fleet.other.address) as other:
        with fleet.stopped(SECOND):
            move = await home.move(keys=KEYS, source=FIRST, destination=SECOND)
            await eventually(lambda: states(fleet.other), {move.name: "running"})
            _, listed, _ = await fleet.lmkv(fleet.other, "ops", "--running")
            assert move.name in listed
            assert "running" in listed
            _, shown, _ = await fleet.lmkv(fleet.other, "ops", "show", move.name)
            assert f"running at coordinator {fleet.home.address}" in shown
            waiting = asyncio.create_task((await other.operation(move.name)).wait())
            with pytest.raises(OperationNotFound, match=f"is at the coordinator {fleet.home.address}"):
                await (await other.operation(move.name)).cancel()
            assert await states(fleet.home) == {move.name: "running"}, "it was not cancelled"
        assert (await waiting).chunk_count == CHUNK_COUNT
        async with Coordinator(fleet.other.address, fleet.home.address) as both:
            assert [(one.name, one.state) for one in await both.operations()] == [(move.name, "done")]
        code, shown, _ = await fleet.lmkv(fleet.other, "ops", "show", move.name)
        assert code == 0
        assert f"{CHUNK_COUNT} chunks ({len(TOKENS)} tokens) arrived" in shown


async def test_an_operation_whose_coordinator_is_killed_is_lost_and_a_repeat_elsewhere_ends_it(fleet: Fleet) -> None:
    async with Coordinator(fleet.home.address) as home, Coordinator(fleet.other.address) as other:
        copy = await home.copy(keys=KEYS, source=FIRST, destination=SECOND)
        await copy.wait()
        await eventually(lambda: states(fleet.other), {copy.name: "done"})
        with fleet.stopped(SECOND):
            move = await home.move(keys=KEYS, source=FIRST, destination=SECOND, request_id="once")
            await eventually(lambda: states(fleet.other), {move.name: "running", copy.name: "done"})
            fleet.home.kill()
            await eventually(lambda: states(fleet.other), {move.name: "lost", copy.name: "done"})
            code, _, said = await fleet.lmkv(fleet.other, "ops", "show", move.name)
            assert code == 1
            assert f"its coordinator {fleet.home.address} has stopped" in said
            assert "repeat the call with the same request_id" in said
            with pytest.raises(OperationNotFound, match="is lost"):
                await other.operation(move.name)

        async def all_have_reported() -> bool:
            return all(instance.synced for instance in await other.instances())

        await eventually(all_have_reported, True)
        repeated = await other.move(keys=KEYS, source=FIRST, destination=SECOND, request_id="once")
        assert (await repeated.wait()).chunk_count == CHUNK_COUNT
        assert await states(fleet.other) == {repeated.name: "done", move.name: "lost", copy.name: "done"}


async def test_a_coordinator_that_stops_leaves_its_running_operations_as_lost_at_once(fleet: Fleet) -> None:
    async with Coordinator(fleet.home.address) as home:
        with fleet.stopped(SECOND):
            move = await home.move(keys=KEYS, source=FIRST, destination=SECOND)
            await eventually(lambda: states(fleet.other), {move.name: "running"})
            await asyncio.to_thread(fleet.home.stop)
            assert await states(fleet.other) == {move.name: "lost"}


async def test_a_record_that_was_changed_in_the_store_is_not_shown(fleet: Fleet) -> None:
    async with Coordinator(fleet.home.address) as home, Coordinator(fleet.other.address) as other:
        copy = await home.copy(keys=KEYS, source=FIRST, destination=SECOND)
        await copy.wait()
        await eventually(lambda: states(fleet.other), {copy.name: "done"})
        with fleet.server.client() as client:
            (held,) = (key for key in client.keys("lmkv:*operations:/*"))
            record = bytearray(client.hget(held, copy.name))
            record[-1] ^= 1
            client.hset(held, mapping={copy.name: bytes(record), "move-18af3c5d2e9b7f01": bytes(record)})
        assert await states(fleet.other) == {}
        with pytest.raises(OperationNotFound):
            await other.operation(copy.name)
        assert await states(fleet.home) == {copy.name: "done"}


async def test_the_newest_operations_are_shared_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_RECORDS", 2)
    with RedisServer() as server:
        config = CoordinatorConfig(port=0, http_port=OFF, cluster_secret="hush", layout_map_url=server.url)
        async with (
            CoordinatorServer(config) as home,
            CoordinatorServer(config) as other,
            Coordinator(home.address) as at_home,
            Coordinator(other.address) as at_other,
        ):
            names = []
            for _ in range(4):
                clear = await at_home.clear(everything=True)
                await clear.wait()
                names.append(clear.name)

            async def listed() -> list[str]:
                return [operation.name for operation in await at_other.operations()]

            await eventually(listed, names[:1:-1])
            assert len(await at_home.operations()) == 4


# --- Records -----------------------------------------------------------------------------------------------------


def ended(**changed: Any) -> Operation:
    progress = pb.MoveProgress(chunk_count=3)
    progress.create_time.FromSeconds(1_700_000_000)
    progress.end_time.FromSeconds(1_700_000_001)
    values = {"kind": "move", "progress": progress, "request": None, "create_time": 0.0, "expire_time": 0.0}
    return Operation(name=NAME, **{**values, **changed})


SEAL = RecordSeal(b"hush", "team-a")


def shown(data: bytes, seal: RecordSeal = SEAL, owner: str = OWNER, name: str = NAME) -> dict[str, Any]:
    """What HTTP shows of a record."""
    message = to_proto(seal.decode(owner, name, data))
    answer: dict[str, Any] = json.loads(json_format.MessageToJson(message))
    return answer


def test_a_record_shows_the_operation_and_its_coordinator() -> None:
    result = pb.MoveResult(chunk_count=3)
    answer = shown(SEAL.encode(OWNER, ended(result=result)))
    assert answer["done"] is True
    assert answer["response"]["chunkCount"] == 3
    assert answer["metadata"]["coordinator"] == "head-1:9000"


def test_a_record_of_a_failure_shows_the_error() -> None:
    answer = shown(SEAL.encode(OWNER, ended(error=InstanceNotFound("node-9 left", instance_id="node-9"))))
    assert answer["error"]["details"][0]["reason"] == "INSTANCE_NOT_FOUND"


@pytest.mark.parametrize(
    "read",
    [
        {"seal": RecordSeal(b"other", "team-a")},
        {"seal": RecordSeal(b"hush", "team-b")},
        {"owner": "head-2:9000#0123456789abcdef"},
        {"name": "move-18af3c5d2e9b7f02"},
    ],
)
def test_a_record_is_of_one_secret_tenant_coordinator_and_name(read: dict[str, Any]) -> None:
    data = SEAL.encode(OWNER, ended(result=pb.MoveResult()))
    with pytest.raises(ValueError, match="cluster_secret"):
        shown(data, **read)


def test_a_record_that_could_not_be_shown_is_refused_or_rebuilt() -> None:
    impossible = pb.MoveProgress()
    impossible.create_time.seconds = 1 << 60
    with pytest.raises(LmkvError, match="out of the range"):
        shown(SEAL.encode(OWNER, ended(progress=impossible)))

    status = status_pb2.Status(code=5, message="gone", details=[any_pb2.Any(type_url="type.example/unknown")])
    result = pb.MoveResult()
    result.failures.add(chunk_keys=[bytes(16)], status=status)
    answer = shown(SEAL.encode(OWNER, ended(result=result)))
    assert answer["response"]["failures"][0]["status"]["message"] == "gone"


def test_a_record_that_is_too_large_has_no_failures() -> None:
    result = pb.MoveResult(chunk_count=7)
    result.failures.add(chunk_keys=[bytes(16)] * (shared.MAX_RECORD_BYTES // 16))
    data = SEAL.encode(OWNER, ended(result=result))
    assert len(data) < shared.MAX_RECORD_BYTES
    assert shown(data)["response"] == {**shown(data)["response"], "chunkCount": 7}
    assert "failures" not in shown(data)["response"]
