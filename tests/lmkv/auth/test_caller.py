"""The table of roles, held against what the protos say there is to call."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.longrunning import operations_pb2
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from lmkv import rpc
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.caller import (
    ANONYMOUS,
    CLIENT_RPC,
    ENGINES_RPC,
    ROLES,
    UNAUTHENTICATED_METHODS,
    Role,
    caller_identity,
    read_callers,
)
from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.errors import ConfigError
from lmkv.ext_proc import external_processor_pb2
from lmkv.internal.v1 import lookup_service_pb2, report_service_pb2
from lmkv.v1 import cache_service_pb2, engine_service_pb2, peer_service_pb2, registry_service_pb2
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, CacheServiceStub, add_CacheServiceServicer_to_server
from lmkv_server.coordinator.http.app import rpc_of
from lmkv_server.http.guard import VIEW_RPC
from tests.support.certificates import issue
from tests.support.tokens import entry, sha256, write

SERVED = (
    cache_service_pb2,
    registry_service_pb2,
    lookup_service_pb2,
    report_service_pb2,
    peer_service_pb2,
    engine_service_pb2,
    operations_pb2,
)
PICKER = external_processor_pb2


def methods(file: FileDescriptor) -> set[str]:
    return {
        f"{service.full_name}/{method.name}" for service in file.services_by_name.values() for method in service.methods
    }


def test_every_rpc_is_in_the_table_and_nothing_else() -> None:
    served = set().union(
        *(methods(module.DESCRIPTOR) for module in (*SERVED, PICKER)), methods(reflection_pb2.DESCRIPTOR)
    )
    assert served | {CLIENT_RPC, ENGINES_RPC} == ROLES.keys()


def test_only_probes_need_no_token() -> None:
    assert methods(health_pb2.DESCRIPTOR) == UNAUTHENTICATED_METHODS
    assert not UNAUTHENTICATED_METHODS & ROLES.keys()


def test_an_admin_may_call_everything_and_every_rpc_is_somebodys() -> None:
    assert all(Role.ADMIN in roles for roles in ROLES.values())


@pytest.mark.parametrize("act", ["Move", "Pin", "Unpin", "Hint", "Clear", "Drain"])
def test_who_only_looks_and_who_only_stores_may_not_act_on_the_fleet(act: str) -> None:
    assert ROLES[f"lmkv.v1.CacheService/{act}"] == {Role.OPERATOR, Role.ADMIN}


def test_clients_of_a_proxy_may_call_nothing_else() -> None:
    assert {rpc for rpc, roles in ROLES.items() if Role.CLIENT in roles} == {CLIENT_RPC}


def test_memory_is_described_to_nodes_only() -> None:
    assert ROLES["lmkv.v1.PeerService/Init"] == {Role.ENGINE, Role.ADMIN}


def test_the_table_in_the_documentation_is_this_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text()
    rows = dict(re.findall(r"^\| `(engine|reader|operator|client|admin)` \| [^|]*\| ([^|]*)\|$", page, re.MULTILINE))
    assert rows.keys() == set(Role)
    named = {
        role: {rpc for rpc in ROLES for name in re.findall(r"`([^`]+)`", row) if stands_for(name, rpc)}
        for role, row in rows.items()
    }
    named["operator"] |= named["reader"]
    named["admin"] = set(ROLES)
    assert named == {role: {rpc for rpc, roles in ROLES.items() if role in roles} for role in Role}


def stands_for(name: str, rpc: str) -> bool:
    """Whether `SERVICE/METHOD` or `SERVICE/*`, without the package, is an RPC, or one of the service."""
    short = rpc.rpartition(".")[2]
    return short == name or (name.endswith("/*") and short.startswith(name[:-1]))


def test_engines_neither_list_instances_nor_read_metrics() -> None:
    assert ROLES["lmkv.v1.RegistryService/ListInstances"] == {Role.READER, Role.OPERATOR, Role.ADMIN}
    assert rpc_of("/metrics") == VIEW_RPC == "lmkv.v1.RegistryService/ListInstances"


class Recorder(CacheServiceServicer):
    """Records the identity of each caller. It answers one RPC."""

    Explain: Any = None
    LookupStream: Any = None
    Move: Any = None
    Pin: Any = None
    Unpin: Any = None
    ListPins: Any = None
    Hint: Any = None
    Clear: Any = None
    Drain: Any = None
    Watch: Any = None

    def __init__(self) -> None:
        self.identities: list[str] = []

    async def Lookup(self, request: LookupRequest, context: Any) -> LookupResponse:  # noqa: N802
        self.identities.append(caller_identity(context))
        return LookupResponse()


@asynccontextmanager
async def serving(recorder: Recorder, authenticator: Authenticator, credentials: Credentials) -> AsyncIterator[str]:
    server = await rpc.make_server(["lmkv.v1.CacheService"], authenticator=authenticator)
    add_CacheServiceServicer_to_server(recorder, server)
    port = rpc.add_port(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def look_up(address: str, credentials: Credentials) -> None:
    async with rpc.open_channel(address, credentials) as channel:
        await CacheServiceStub(channel).Lookup(LookupRequest(), timeout=60)


async def test_a_caller_is_anonymous_where_nothing_is_configured() -> None:
    recorder = Recorder()
    async with serving(recorder, OPEN_AUTHENTICATOR, rpc.PLAINTEXT) as address:
        await look_up(address, rpc.PLAINTEXT)
    assert recorder.identities == [ANONYMOUS]


async def test_a_token_is_identified_by_tenant_and_name(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.yaml", entry("engine", "a", name="nodes"), entry("engine", "b", name="nodes"))
    recorder = Recorder()
    async with serving(recorder, Authenticator(path), rpc.PLAINTEXT) as address:
        for tenant in ("a", "b"):
            await look_up(address, Credentials(token=BearerToken(text=f"engine-of-{tenant}-token")))
    assert recorder.identities == ["token:a/nodes", "token:b/nodes"]


async def test_a_certificate_is_identified_by_its_names_and_only_where_it_is_verified(tmp_path: Path) -> None:
    fleet = issue(tmp_path)
    recorder = Recorder()
    async with serving(recorder, OPEN_AUTHENTICATOR, fleet.strict_server) as address:
        await look_up(address, fleet.known_client)
    async with serving(recorder, OPEN_AUTHENTICATOR, fleet.server) as address:
        await look_up(address, fleet.known_client)
    assert recorder.identities == ["certificate:127.0.0.1,localhost", ANONYMOUS]


async def test_a_token_counts_more_than_a_certificate(tmp_path: Path) -> None:
    fleet = issue(tmp_path / "fleet")
    path = write(tmp_path / "tokens.yaml", entry("engine", "a"))
    shown = Credentials(ca=fleet.ca, cert=fleet.cert, key=fleet.key, token=BearerToken(text="engine-of-a-token"))
    recorder = Recorder()
    async with serving(recorder, Authenticator(path), fleet.strict_server) as address:
        await look_up(address, shown)
    assert recorder.identities == ["token:a/engine-of-a"]


def test_who_shows_a_token_is_known_by_its_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.yaml", entry("engine", "team-a"), entry("reader"), team_a={"max_chunks": 7})
    callers, files = read_callers(path)
    engine = callers.find("engine-of-team-a-token")
    assert engine is not None
    assert (engine.name, engine.role, engine.tenant) == ("engine-of-team-a", Role.ENGINE, "team-a")
    assert callers.find("reader-token") is not None
    for stranger in ("", "reader", "reader-token ", sha256("reader-token")):
        assert callers.find(stranger) is None
    assert callers.tenants == {"", "team-a", "team_a"}
    assert callers.quotas["team_a"].max_chunks == 7
    assert files == [path]


def test_a_token_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "grafana").write_text("plain\n")
    path = write(tmp_path / "tokens.yaml", {"name": "grafana", "role": "reader", "file": str(tmp_path / "grafana")})
    callers, files = read_callers(path)
    assert callers.find("plain") is not None
    assert files == [path, str(tmp_path / "grafana")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens: [{name: a, role: king, sha256: s}]", r"Invalid enum value 'king' - at `\$.tokens\[0\].role`"),
        ("tokens: [{name: a, role: reader}]", "a needs either sha256 .* or file"),
        (f"tokens: [{{name: a, role: reader, sha256: {sha256('x')}, file: y}}]", "a needs either sha256 .* or file"),
        ("tokens: [{name: a, role: reader, sha256: s3cret}]", r"at `\$.tokens\[0\].sha256`"),
        ("tokens: [{name: a, role: reader, token: s3cret}]", "unknown field `token`"),
        ("tokens: [{name: a b, role: reader, file: s}]", r"at `\$.tokens\[0\].name`"),
        ("tokens: [{name: a, role: reader, file: /nowhere}]", "a: file: cannot read /nowhere"),
        ("s3cret", "Expected `object`, got `str`"),
        ("tokens: [\n s3cret: {", "is not valid YAML, line 2"),
        ("tenants: {}", "missing required field `tokens`"),
    ],
)
def test_what_is_wrong_is_named_and_no_token_is_quoted(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"auth_tokens: .*{says}") as refusal:
        read_callers(str(path))
    assert "s3cret" not in str(refusal.value)


def test_one_token_is_one_callers(tmp_path: Path) -> None:
    twice = [{"name": name, "role": "reader", "sha256": sha256("same")} for name in ("a", "b")]
    with pytest.raises(ConfigError, match="gives one token to two callers"):
        read_callers(write(tmp_path / "tokens.yaml", *twice))


def test_the_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(# auth_tokens.*?)```", page, re.DOTALL)
    for name in ("router-a", "prometheus", "root"):
        (tmp_path / name).write_text(f"{name}-token")
    path = tmp_path / "tokens.yaml"
    path.write_text(text.replace("/run/secrets", str(tmp_path)))
    callers, _ = read_callers(str(path))
    router = callers.find("router-a-token")
    assert router is not None
    assert (router.role, router.tenant) == (Role.OPERATOR, "team-a")
    assert callers.quotas.keys() == {"team-a"}


def test_the_documentation_lists_every_role() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    assert all(f"| `{role}` |" in page for role in Role)
