"""Nodes that find each other by the coordinator's registry: whole nodes on hosts of their own, with tokens."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import NodeConfig
from lmkv.errors import InstanceNotFound
from lmkv.keys import join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.registry_service_pb2 import LocateInstanceRequest
from lmkv.v1.registry_service_pb2_grpc import RegistryServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.fleet import membership
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key
from tests.server.node.engine_client import EngineClient
from tests.server.node.whole_nodes import SPEC, store
from tests.support.specs import small_spec
from tests.support.tokens import entry, write
from tests.waiting import WAIT_SECONDS

TOKEN = "engine-of-a-token"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write(tmp_path / "tokens.yaml", *(entry("engine", tenant) for tenant in ("a", "b")))


@pytest.fixture(autouse=True)
def _a_busy_machine_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOCATE_SECONDS", WAIT_SECONDS)


@pytest.fixture
def coordinator_options(tokens: str) -> dict[str, Any]:
    return {"auth_tokens": tokens}


@pytest.fixture
async def nodes(coordinator: Coordinator, tokens: str) -> AsyncIterator[dict[str, Node]]:
    """The nodes of a prefill and a decode, as on two hosts: each has its own runtime folder; one of another tenant."""
    async with AsyncExitStack() as stack:
        nodes = {}
        for name, tenant in (("prefill", "a"), ("decode", "a"), ("foreign", "b")):
            folder = stack.enter_context(TemporaryDirectory(prefix="lmkv-", dir="/tmp"))
            config = NodeConfig(
                instance_id=name,
                runtime_dir=folder,
                max_local_cpu_size=1 / 64,
                transfer_channel="tcp",
                coordinator_address=(coordinator.address,),
                auth_tokens=tokens,
                auth_token=f"engine-of-{tenant}-token",
            )
            nodes[name] = await stack.enter_async_context(Node(config))
        yield nodes


async def handed(engine: EngineClient, instance_id: str) -> pb.HandedChunks:
    """How the handoff of one stored chunk went."""
    handoff = pb.HandChunks(
        handoff_id=f"to {instance_id}",
        decode_instance_id=instance_id,
        chunk_keys=join_keys([chunk_key(1)]),
        token_count=SPEC.chunk_size,
    )
    await engine.say(hand=[handoff])
    (one,) = await engine.hear("handed")
    assert isinstance(one, pb.HandedChunks)
    return one


async def test_a_prompt_is_handed_to_registered_instances_and_to_no_address(nodes: dict[str, Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.setblocking(False)
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        async with (
            EngineClient(nodes["decode"], spec=small_spec()),
            EngineClient(nodes["foreign"], spec=small_spec()),
            EngineClient(nodes["prefill"]) as engine,
        ):
            await store(engine, nodes["prefill"].pool, 1)
            for name in (address, "foreign", "unknown"):
                refused = await handed(engine, name)
                assert refused.status.code == grpc.StatusCode.NOT_FOUND.value[0]
                assert "coordinator_address" in refused.status.message
            arrived = await handed(engine, "decode")
            assert (arrived.status.code, arrived.chunk_count) == (0, 1)
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert nodes["decode"].tier.get(chunk_key(1))


async def test_an_instance_is_located_within_its_tenant(coordinator: Coordinator, nodes: dict[str, Node]) -> None:
    credentials = Credentials(token=BearerToken(text=TOKEN))
    async with rpc.open_channel(coordinator.address, credentials) as channel:
        registry: Any = RegistryServiceStub(channel)
        found = await registry.LocateInstance(LocateInstanceRequest(instance_id="decode"), timeout=WAIT_SECONDS)
        assert (found.epoch, found.peer_address) == (nodes["decode"].epoch, nodes["decode"].peer_address)
        for name in ("foreign", "unknown", "x" * 10_000):
            with pytest.raises(grpc.RpcError) as refusal:
                await registry.LocateInstance(LocateInstanceRequest(instance_id=name), timeout=WAIT_SECONDS)
            assert isinstance(rpc.from_rpc_error(refusal.value), InstanceNotFound)
