"""An instance id belongs to the node that registered it; a node that loses it keeps its engines and its cache."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError
from lmkv.internal.v1.report_service_pb2 import ReportRequest
from lmkv.runtime.folder import Folder
from lmkv.v1.registry_service_pb2 import DeregisterRequest, Instance, ListInstancesRequest
from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.instance_lock import instance_secret
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import NodeProcess
from tests.server.node.whole_nodes import mapped, store
from tests.support.node_stub import NodeStub, registration
from tests.waiting import WAIT_SECONDS, eventually


@pytest.fixture
def nodes(runtime_dir: Path) -> Iterator[list[NodeProcess]]:
    """Nodes to kill in the end."""
    started: list[NodeProcess] = []
    yield started
    for node in started:
        node.process.send_signal(signal.SIGCONT)
        node.process.kill()
        node.process.wait()


class Fleet:
    """A coordinator with its instances, as a client of the same tenant sees and attacks it."""

    def __init__(self, coordinator: Coordinator, channel: grpc.aio.Channel) -> None:
        self.address = coordinator.address
        self.registry: Any = NodeStub(channel)

    async def listed(self) -> dict[str, Instance]:
        response = await self.registry.ListInstances(ListInstancesRequest(), timeout=WAIT_SECONDS)
        return {instance.instance_id: instance for instance in response.instances}

    async def joined(self, *, after: int = 0) -> Instance:
        """The node once it has reported what it holds, of a later epoch."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                instance = (await self.listed()).get("n")
                if instance and instance.synced and instance.epoch > after:
                    return instance
                await asyncio.sleep(0.05)

    async def left(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while await self.listed():  # noqa: ASYNC110 # another process changes it
                await asyncio.sleep(0.05)

    async def register(self, instance: Instance, secret: bytes = b"") -> None:
        await self.registry.Register(registration(instance, secret), timeout=WAIT_SECONDS)

    @asynccontextmanager
    async def taken(self, instance: Instance, secret: bytes) -> AsyncIterator[None]:
        """Holds an id for as long as this lasts."""
        await self.register(instance, secret)
        stream = self.registry.Report()

        async def report() -> None:
            sequence = 0
            while True:
                sequence += 1
                request = ReportRequest(instance_id="n", epoch=instance.epoch, sequence=sequence)
                request.snapshot = request.snapshot_end = sequence == 1
                request.secret = secret if sequence == 1 else b""
                await stream.write(request)
                await stream.read()
                await asyncio.sleep(0.1)

        reporting = asyncio.create_task(report())
        try:
            yield
            assert not reporting.done(), "the id was held all the time"
        finally:
            reporting.cancel()
            stream.cancel()
            await asyncio.gather(reporting, return_exceptions=True)


@asynccontextmanager
async def fleet_of(lease_ttl: float) -> AsyncIterator[Fleet]:
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=lease_ttl)) as coordinator,
        rpc.open_channel(coordinator.address) as channel,
    ):
        yield Fleet(coordinator, channel)


async def error_of(call: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return rpc.from_rpc_error(caught.value)


def start(nodes: list[NodeProcess], folder: Path, fleet: Fleet, **settings: str) -> NodeProcess:
    values = {"enable_p2p": "true", "coordinator_address": fleet.address, "p2p_port": str(free_port())} | settings
    nodes.append(NodeProcess(folder, (), values))
    return nodes[-1]


@pytest.mark.parametrize("secret", [b"", b"a secret of a stranger"])
async def test_another_caller_cannot_take_report_for_or_end_an_id(
    nodes: list[NodeProcess], runtime_dir: Path, secret: bytes
) -> None:
    async with fleet_of(lease_ttl=600.0) as fleet:
        node = start(nodes, runtime_dir, fleet)
        instance = await fleet.joined()
        attack = Instance(instance_id="n", epoch=instance.epoch + 1, peer_address=instance.peer_address)
        refused = await error_of(fleet.register(attack, secret))
        assert (refused.code, refused.reason) == ("ALREADY_EXISTS", "INSTANCE_ID_IN_USE")
        attack.epoch = instance.epoch
        assert (await error_of(fleet.register(attack, secret))).reason == "INSTANCE_ID_IN_USE"
        stream = fleet.registry.Report()
        await stream.write(
            ReportRequest(
                instance_id="n", epoch=instance.epoch, sequence=1, snapshot=True, snapshot_end=True, secret=secret
            )
        )
        assert (await error_of(stream.read())).reason == "INSTANCE_ID_IN_USE"
        farewell = DeregisterRequest(instance_id="n", epoch=instance.epoch, secret=secret)
        refused = await error_of(fleet.registry.Deregister(farewell, timeout=WAIT_SECONDS))
        assert refused.reason == "INSTANCE_ID_IN_USE"
        async with EngineClient(node.socket) as engine:  # which makes the node register again
            async with asyncio.timeout(WAIT_SECONDS):
                while (listed := (await fleet.listed())["n"]).engine_count != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (listed.epoch, listed.synced) == (instance.epoch, True)
            assert engine.welcomed.epoch == instance.epoch
        assert node.process.poll() is None


async def test_a_node_that_is_killed_takes_its_id_again_before_its_lease_ends(
    nodes: list[NodeProcess], runtime_dir: Path
) -> None:
    async with fleet_of(lease_ttl=3600.0) as fleet:
        start(nodes, runtime_dir, fleet)
        before = await fleet.joined()
        nodes[0].stop(signal.SIGKILL)
        start(nodes, runtime_dir, fleet)  # at another address
        after = await fleet.joined(after=before.epoch)
        assert after.peer_address != before.peer_address


async def test_a_node_that_lost_its_id_keeps_its_engines_and_cache_and_takes_it_again(
    nodes: list[NodeProcess], runtime_dir: Path
) -> None:
    port = free_port()
    async with fleet_of(lease_ttl=3.0) as fleet:
        node = start(nodes, runtime_dir, fleet, metrics_port=str(port))
        instance = await fleet.joined()
        node.ready()
        async with EngineClient(node.socket) as engine:
            with mapped(engine) as attached:
                await store(engine, attached.pool, 1, 2, 3)
                node.process.send_signal(signal.SIGSTOP)
                await fleet.left()
                stranger = Instance(instance_id="n", epoch=instance.epoch + 1, peer_address="127.0.0.1:1")
                async with fleet.taken(stranger, os.urandom(32)):
                    node.process.send_signal(signal.SIGCONT)
                    async with asyncio.timeout(WAIT_SECONDS):
                        while "lost its registration" not in node.output:  # noqa: ASYNC110
                            await asyncio.sleep(0.05)
                    await eventually(partial(asyncio.to_thread, refusing, port), 1.0)
                    found = await engine.lookup("ticket", chunk_keys(1, 2, 3))
                    assert len(found.own) == 3
                    assert node.process.poll() is None
                await fleet.left()
                again = await fleet.joined(after=instance.epoch - 1)
                assert again.epoch == instance.epoch
                await eventually(partial(asyncio.to_thread, refusing, port), 0.0)
        assert node.output.count("lost its registration") == 1
        assert node.stop() == 0, node.output


def refusing(port: int) -> float:
    """How many coordinators refuse the node, by its metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as response:
        return float(response.read().decode().partition("\nlmkv_node_coordinators_refusing{")[2].split()[1])


def test_the_secret_is_kept_for_its_user_only_and_one_that_others_can_read_is_replaced(tmp_path: Path) -> None:
    folder, path = Folder.private(tmp_path, "runtime_dir"), tmp_path / "secret"
    secret = instance_secret(folder)
    assert len(secret) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert instance_secret(folder) == secret
    path.chmod(0o644)
    assert instance_secret(folder) != secret
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert len(instance_secret(folder)) == 32
    assert not path.is_symlink()
    path.write_bytes(b"short")
    assert len(instance_secret(folder)) == 32
