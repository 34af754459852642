"""Peers with tokens: a node describes its memory only to nodes of its own tenant."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError, LmkvError, SessionNotFound
from lmkv.v1.peer_service_pb2 import AcquireRequest, InitRequest, ReleaseRequest
from lmkv.v1.peer_service_pb2_grpc import PeerServiceStub
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.services import registry
from lmkv_server.node.node import Node
from tests.server.coordinator.scripted_instance import until
from tests.server.node.peer_parts import SMALL, Parts, Taken, keys_of
from tests.support.metrics import SAMPLE, serving_metrics
from tests.support.tokens import entry, write
from tests.waiting import WAIT_SECONDS

KEYS = keys_of(2)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(
        tmp_path / "tokens.yaml",
        *(entry(role, tenant) for role in ("engine", "reader") for tenant in ("a", "b")),
    )


def node(name: str, path: str, token: str) -> Parts:
    return Parts(name, transfer_channel="shm", auth_tokens=path, auth_token=token)


async def fetched_count(reader: Parts, owner: Parts) -> int:
    taken = Taken(reader)
    fetched = await reader.fetch(SMALL, KEYS, [owner.holder(len(KEYS))], 60.0, taken)
    taken.let_go()
    return fetched.chunk_count


@pytest.mark.parametrize(("tenant", "count"), [("a", len(KEYS)), ("b", 0)])
async def test_chunks_go_to_nodes_of_the_same_tenant_only(path: str, tenant: str, count: int) -> None:
    async with (
        node("owner", path, "engine-of-a-token") as owner,
        node("reader", path, f"engine-of-{tenant}-token") as reader,
    ):
        for key in KEYS:
            owner.put(key)
        assert await fetched_count(reader, owner) == count


@pytest.mark.parametrize(
    ("token", "code"),
    [
        ("", "UNAUTHENTICATED"),
        ("made-up", "UNAUTHENTICATED"),
        ("reader-of-a-token", "PERMISSION_DENIED"),
        ("engine-of-b-token", "PERMISSION_DENIED"),
    ],
)
async def test_no_other_tenant_learns_how_to_read_the_memory(path: str, token: str, code: str) -> None:
    async with (
        node("owner", path, "engine-of-a-token") as owner,
        rpc.open_channel(owner.address, Credentials(token=BearerToken(text=token))) as channel,
    ):
        stub: Any = PeerServiceStub(channel)
        request = InitRequest(instance_id="x", epoch=1, spec=SMALL.to_proto(), channels=["shm"])
        with pytest.raises(LmkvError) as refusal:
            await rpc.call(stub.Init, "lmkv.v1.PeerService/Init", owner.address, request, 5.0)
        assert refusal.value.code == code


async def test_what_one_token_was_granted_is_unknown_to_another_that_knows_the_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.yaml", entry("engine", "a"), entry("admin", "a"))
    async with (
        node("owner", path, "engine-of-a-token") as owner,
        rpc.open_channel(owner.address, Credentials(token=BearerToken(text="engine-of-a-token"))) as engine,
        rpc.open_channel(owner.address, Credentials(token=BearerToken(text="admin-of-a-token"))) as admin,
    ):
        chunk = owner.put(KEYS[0])
        stub, thief = PeerServiceStub(engine), PeerServiceStub(admin)
        session = (await stub.Init(InitRequest(instance_id="x", epoch=1, spec=SMALL.to_proto()))).session_id
        request = AcquireRequest(
            session_id=session, peer_epoch=owner.epoch, fingerprint=SMALL.fingerprint, chunk_keys=KEYS
        )
        grant_id = (await stub.Acquire(request)).grant.grant_id
        await thief.Release(ReleaseRequest(grant_id=grant_id, session_id=session))
        assert chunk.holds == 1
        with pytest.raises(grpc.RpcError) as refusal:
            await thief.Acquire(request)
        assert isinstance(rpc.from_rpc_error(refusal.value), SessionNotFound)
        await stub.Release(ReleaseRequest(grant_id=grant_id, session_id=session))
        assert chunk.holds == 0


async def test_a_node_whose_own_token_is_unknown_does_not_start(path: str, runtime_dir: Path) -> None:
    config = NodeConfig(
        instance_id="n", runtime_dir=str(runtime_dir), max_local_cpu_size=1 / 64, auth_tokens=path, auth_token="other"
    )
    with pytest.raises(ConfigError, match="does not list this process's own token; set auth_token"):
        await Node(config).__aenter__()


async def test_metrics_are_for_those_who_may_look(path: str) -> None:
    gate = Authenticator(path, BearerToken(text="engine-of-a-token"))
    async with (
        serving_metrics(authenticator=gate) as server,
        httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as http,
    ):
        answers = {}
        for token in ("", "made-up", "reader-of-a-token", "reader-of-b-token"):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            answers[token] = await http.get(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
        codes = [answer.status_code for answer in answers.values()]
        assert codes == [401, 401, 200, 403]
        assert SAMPLE in answers["reader-of-a-token"].text
        assert "set auth_token" in answers[""].text


async def test_a_node_whose_tenant_is_full_joins_once_there_is_room(
    path: str, tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "QUOTA_RETRY_SECONDS", 0.1)
    tokens = [entry("engine", "a"), entry("reader", "a")]
    quota = write(tmp_path / "coordinator.yaml", *tokens, a={"max_instances": 1})
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, auth_tokens=str(quota))) as coordinator,
        AsyncExitStack() as stack,
    ):
        for name in ("first", "second"):
            config = NodeConfig(
                instance_id=name,
                runtime_dir=str(runtime_dir),
                max_local_cpu_size=1 / 64,
                coordinator_address=(coordinator.address,),
                auth_token="engine-of-a-token",
            )
            await stack.enter_async_context(Node(config))
        instances = coordinator.tenants.of("a").core.instances
        assert [instance.info.instance_id for instance in instances] == ["first"]
        write(tmp_path / "coordinator.yaml", *tokens, a={"max_instances": 2})
        await until(lambda: len(instances) == 2)
