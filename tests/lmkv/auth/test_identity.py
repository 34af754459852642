"""The identity of a caller, over real sockets: its token, its certificate, or none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lmkv import rpc
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR, Authenticator
from lmkv.auth.credentials import Credentials
from lmkv.auth.identity import ANONYMOUS, caller_identity
from lmkv.auth.token import BearerToken
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, CacheServiceStub, add_CacheServiceServicer_to_server
from tests.support.certificates import issue
from tests.support.tokens import entry, write


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
