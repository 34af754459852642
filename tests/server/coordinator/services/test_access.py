"""Who may call what, over real sockets: every RPC and path, without a token, in a wrong role, in the right one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from lmkv import rpc
from lmkv.auth.authenticator import OPEN_AUTHENTICATOR
from lmkv.auth.caller import ROLES, Role
from lmkv.config import CoordinatorConfig
from lmkv.internal.v1 import report_service_pb2
from lmkv.rpc.messages import by_keys
from lmkv.telemetry.calls import ServerCalls
from lmkv.tiers import HOST
from lmkv.v1 import registry_service_pb2
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupStreamRequest, MoveRequest, WatchRequest
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.http.app import RPC_BY_PATH, make_app, rpc_of
from lmkv_server.coordinator.http.tokenizers import Tokenizers
from lmkv_server.coordinator.services.layout_watch import MAX_WATCHERS_PER_CLIENT
from lmkv_server.coordinator.services.services import SERVICE_NAMES, Services, Tenants
from lmkv_server.http.guard import HostGuard
from tests.server.coordinator.cases import KEYS
from tests.server.coordinator.guarded import ENTRIES, Guarded, guarded, token_of
from tests.support.node_stub import registration
from tests.support.specs import LLAMA
from tests.support.tokens import entry, write
from tests.waiting import WAIT_SECONDS

SERVED = [method for method in ROLES if method.partition("/")[0] in SERVICE_NAMES]
PATHS = [f"/{method}" for method in SERVED if not method.endswith(("Report", "Register", "LookupStream"))]


async def code_of(channel: grpc.aio.Channel, method: str, request: bytes = b"") -> str:
    """The status of a call with one request; "OK" for a stream that answers.

    The request goes with the call's start also where the RPC takes a stream of them: gRPC's aio client replaces the
    server's status by INTERNAL if the server ends the call while the client still writes.
    """
    call = channel.unary_stream(f"/{method}", request_serializer=bytes, response_deserializer=bytes)
    under_way = call(request, timeout=20)
    try:
        answer: Any = await under_way.read()
        return "OK" if isinstance(answer, bytes) else (await under_way.code()).name
    except grpc.RpcError as error:
        return error.code().name
    finally:
        under_way.cancel()


async def test_all_calls_but_probes_need_a_token(fleet: Guarded) -> None:
    for token in ("", "unknown"):
        channel = await fleet.channel(token)
        codes = await asyncio.gather(*(code_of(channel, method) for method in SERVED))
        assert dict(zip(SERVED, codes, strict=True)) == dict.fromkeys(SERVED, "UNAUTHENTICATED")
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", list(Role))
async def test_each_role_calls_what_the_table_says_and_nothing_else(fleet: Guarded, role: Role) -> None:
    channel = await fleet.channel(token_of(role))
    codes = await asyncio.gather(*(code_of(channel, method) for method in SERVED))
    refused = {method for method, code in zip(SERVED, codes, strict=True) if code == "PERMISSION_DENIED"}
    assert refused == {method for method in SERVED if role not in ROLES[method]}
    assert "UNAUTHENTICATED" not in codes


@pytest.mark.parametrize("role", ["", *Role])
async def test_the_same_holds_over_http(fleet: Guarded, role: str) -> None:
    async with fleet.http(token_of(role) if role else "") as http:
        for path in [*RPC_BY_PATH, *PATHS, "/static/page.js"]:
            response = await http.post(path, json={"startRevision": "-1"})  # which ends a watch
            method = rpc_of(path)
            if method not in ROLES:  # probes
                assert response.status_code == 405
            elif not role:
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"].startswith("Basic realm=")
            elif role not in ROLES[method]:
                assert response.status_code == 403, path
            else:
                assert response.status_code not in (401, 403), path


async def test_probes_need_no_token_and_see_no_names(fleet: Guarded) -> None:
    engines = await fleet.registry(token_of("engine"))
    instance = registry_service_pb2.Instance(instance_id="secretive", epoch=1, peer_address="10.0.0.1:1")
    await engines.Register(registration(instance), timeout=WAIT_SECONDS)
    async with fleet.http("") as http:
        assert (await http.get("/healthz")).status_code == 200
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert "secretive" not in ready.text


async def test_a_browser_shows_its_token_as_a_password(fleet: Guarded) -> None:
    async with fleet.http("") as http:
        page = await http.get("/", auth=httpx.BasicAuth("me", token_of("reader")))
        assert page.status_code == 200
        assert (await http.get("/", auth=httpx.BasicAuth("me", "wrong"))).status_code == 401


async def test_every_path_is_in_the_table() -> None:
    app = make_app(
        Tenants(lambda _: Services(CoordinatorConfig())),
        Tokenizers({}),
        HostGuard(bound="127.0.0.1"),
        OPEN_AUTHENTICATOR,
        ServerCalls(),
    )
    paths = app.paths
    assert paths == RPC_BY_PATH.keys() | {path for path in paths if path[1:] in ROLES}
    assert len(paths) > 25


async def test_a_token_that_is_taken_away_ends_its_stream_with_the_next_message(fleet: Guarded) -> None:
    engine = await fleet.cache(token_of("engine"))
    stream = engine.LookupStream()
    request = LookupRequest(prompt=by_keys(KEYS))
    await stream.write(LookupStreamRequest(requests=[request]))
    assert (await stream.read()).results
    write(fleet.tokens, *(each for each in ENTRIES if each["name"] != "engine"))
    await stream.write(LookupStreamRequest(requests=[request]))
    with pytest.raises(grpc.RpcError) as refusal:
        await stream.read()
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("before", "after"), [("a", "b"), ("a", ""), ("", "a")])
async def test_a_token_that_is_moved_to_another_tenant_loses_its_streams(
    fleet: Guarded, before: str, after: str
) -> None:
    """And what it sends over them afterwards is not applied to its former tenant."""
    engine, cache = await fleet.registry(token_of("engine", before)), await fleet.cache(token_of("engine", before))
    instance = registry_service_pb2.Instance(
        instance_id="i", epoch=1, peer_address="10.0.0.1:1", specs=[LLAMA.to_proto()]
    )
    await engine.Register(registration(instance), timeout=WAIT_SECONDS)
    reports, lookups = engine.Report(), cache.LookupStream()
    await reports.write(
        report_service_pb2.ReportRequest(instance_id="i", epoch=1, sequence=1, snapshot=True, snapshot_end=True)
    )
    await reports.read()
    request = LookupRequest(prompt=by_keys(KEYS))
    await lookups.write(LookupStreamRequest(requests=[request]))
    assert (await lookups.read()).results
    moved = entry("engine", before)
    rest = [each for each in ENTRIES if each["name"] != moved["name"]]
    write(fleet.tokens, *rest, moved | {"tenant": after})
    change = report_service_pb2.ChunkChange(tier=HOST, fingerprint=LLAMA.fingerprint, admitted_keys=b"".join(KEYS))
    await reports.write(report_service_pb2.ReportRequest(instance_id="i", epoch=1, sequence=2, changes=[change]))
    await lookups.write(LookupStreamRequest(requests=[request]))
    for stream in (reports, lookups):
        with pytest.raises(grpc.RpcError) as refusal:
            await asyncio.wait_for(stream.read(), WAIT_SECONDS)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for tenant in ("", "a", "b"):
        answer = await (await fleet.cache(token_of("reader", tenant))).Lookup(request, timeout=WAIT_SECONDS)
        assert not answer.holders, tenant


async def test_one_client_leaves_watches_to_others(fleet: Guarded) -> None:
    greedy, other = await fleet.cache(token_of("reader")), await fleet.cache(token_of("operator"))
    watches = [greedy.Watch(WatchRequest()) for _ in range(MAX_WATCHERS_PER_CLIENT)]
    for stream in watches:
        await stream.read()
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refusal:
            await greedy.Watch(WatchRequest(), timeout=WAIT_SECONDS).read()
        assert rpc.from_rpc_error(refusal.value).reason == "FULL"
    async with fleet.http(token_of("reader")) as http:
        assert (await http.post("/lmkv.v1.CacheService/Watch", json={})).status_code == 429
    assert await other.Watch(WatchRequest(), timeout=WAIT_SECONDS).read()
    watches.pop().cancel()
    async with asyncio.timeout(120):
        while True:
            try:
                assert await greedy.Watch(WatchRequest(), timeout=WAIT_SECONDS).read()
                break
            except grpc.RpcError:  # the end of the other watch is noticed soon
                await asyncio.sleep(0.05)


async def test_without_tokens_watches_are_shared_by_address() -> None:
    async with Coordinator(CoordinatorConfig(port=0, http_port=0)) as coordinator, AsyncExitStack() as stack:
        path = "/lmkv.v1.CacheService/Watch"
        statuses = []
        for address in ["127.0.0.1"] * (MAX_WATCHERS_PER_CLIENT + 1) + ["127.0.0.2"]:
            transport = httpx.AsyncHTTPTransport(local_address=address)
            client = httpx.AsyncClient(base_url=coordinator.url, transport=transport, timeout=WAIT_SECONDS)
            http = await stack.enter_async_context(client)
            statuses.append((await stack.enter_async_context(http.stream("GET", path))).status_code)
        assert statuses == [200] * MAX_WATCHERS_PER_CLIENT + [429, 200]


async def test_over_http_too(fleet: Guarded) -> None:
    async with fleet.http(token_of("reader", "a")) as http:
        watch = http.stream("POST", "/lmkv.v1.CacheService/Watch", json={})
        async with watch as response, asyncio.timeout(WAIT_SECONDS):
            lines = response.aiter_lines()
            await anext(lines)
            write(fleet.tokens, *(each for each in ENTRIES if each["name"] != "reader-of-a"))
            await fleet.instance("a", "n1", KEYS)
            assert "UNAUTHENTICATED" in [line async for line in lines][-1]


async def test_a_client_that_exceeds_its_rate_gets_a_retry_delay(tmp_path: Path) -> None:
    async with guarded(tmp_path, [entry("reader", max_requests_per_second=1)]) as fleet:
        cache = await fleet.cache(token_of("reader"))
        await cache.Lookup(LookupRequest(), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.gather(*(cache.Lookup(LookupRequest(), timeout=5) for _ in range(20)))
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert status is not None
        assert rpc.from_status(status).reason == "TOO_MANY_REQUESTS"
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert 0 < retry.retry_delay.ToNanoseconds() <= 1e9
        async with fleet.http(token_of("reader")) as http:
            codes = [(await http.post("/lookup", json={"tokens": [1]})).status_code for _ in range(20)]
            assert 429 in codes


async def test_each_question_of_a_stream_counts_against_the_rate(tmp_path: Path) -> None:
    async with guarded(tmp_path, [entry("reader", max_requests_per_second=5)]) as fleet:
        stream = (await fleet.cache(token_of("reader"))).LookupStream()
        await stream.write(LookupStreamRequest(requests=[LookupRequest()] * 200))
        results: list[Any] = []
        while len(results) < 200:
            results += (await asyncio.wait_for(stream.read(), WAIT_SECONDS)).results
        assert results[0].WhichOneof("result") == "response"
        refused = [rpc.from_status(result.error) for result in results if result.WhichOneof("result") == "error"]
        assert refused
        assert {(error.reason, error.metadata["limit"]) for error in refused} == {("TOO_MANY_REQUESTS", "5")}
        stream.cancel()


async def test_a_request_beyond_the_limit_is_refused_before_it_is_read(fleet: Guarded) -> None:
    async with grpc.aio.insecure_channel(fleet.coordinator.address) as boundless:
        call = boundless.unary_unary(
            "/lmkv.v1.CacheService/Lookup", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError) as refusal:
            await call(bytes(2 << 20), timeout=5, metadata=[("authorization", f"Bearer {token_of('reader')}")])
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_no_token_is_ever_logged(fleet: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for token in ("s3cret-token", token_of("reader"), token_of("operator")):
            cache = await fleet.cache(token)
            calls = (cache.Lookup(LookupRequest(), timeout=5), cache.Move(MoveRequest(), timeout=5))
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert token not in str(answer)
            async with fleet.http(token) as http:
                await http.post("/move", json={})
        assert "denied lmkv.v1.CacheService/Move" in caplog.text
    for token in ("s3cret", *(token_of(role) for role in Role)):
        assert token not in caplog.text


async def test_strangers_cause_a_bounded_number_of_log_lines(fleet: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    """Refused calls, undecodable messages and text that is not HTTP: at most a line a second of each kind."""
    began = time.monotonic()
    channel = await fleet.channel("")
    methods = [*SERVED, *(f"grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))]
    for _ in range(10):
        await asyncio.gather(*(code_of(channel, method, b"\xff" * 32) for method in methods))
    host, _, port = fleet.coordinator.http_address.rpartition(":")
    for _ in range(100):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\xff\r\n\r\n")
        await writer.drain()
        writer.close()
    async with fleet.http("unknown") as http:
        await asyncio.gather(*(http.get("/metrics") for _ in range(100)))
    seconds = time.monotonic() - began
    kinds = Counter(record.msg.partition(" (%d more")[0] for record in caplog.records)
    assert kinds, "refusals are logged"
    assert max(kinds.values()) <= 1 + seconds, kinds
    assert len(kinds) <= 3, kinds
    assert not any(record.exc_info for record in caplog.records)
