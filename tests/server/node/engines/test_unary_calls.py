"""The unary calls of `EngineService`, which people make, of a real node over its real unix socket."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.errors import BadChunkKey, EngineNotFound, LmkvError, ModelNotFound
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import ANSWER_SECONDS, EngineClient, absent_count
from tests.server.node.engines.pool_checks import SPEC, is_clean, unlimited


async def failure(call: Awaitable[Any]) -> LmkvError:
    with pytest.raises(grpc.RpcError) as raised:
        await call
    return rpc.from_rpc_error(raised.value)


async def test_people_may_look_without_being_granted_anything(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("sync", chunk_keys(9))
    request = pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(0, 1, 2))
    answer = await engine.stub.Lookup(request, timeout=ANSWER_SECONDS)
    assert (answer.own_chunk_count, absent_count(answer), answer.peer_instance_id) == (2, 0, "")
    assert is_clean(node)


async def test_a_unary_load_without_peers_says_what_is_there(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0))
    await engine.lookup("sync", chunk_keys(9))
    request = pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=chunk_keys(0, 1))
    answer = await engine.stub.Load(request, timeout=ANSWER_SECONDS)
    assert (answer.chunk_count, answer.transferred_bytes) == (1, 0)
    assert is_clean(node)


async def test_a_unary_release_takes_back_what_a_request_was_granted(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("1", chunk_keys(0, 1))
    request = pb.EngineServiceReleaseRequest(engine_id="engine", lookup_id="1")
    assert (await engine.stub.Release(request, timeout=ANSWER_SECONDS)).chunk_count == 2
    assert (await engine.stub.Release(request, timeout=ANSWER_SECONDS)).chunk_count == 0
    assert is_clean(node)


BAD_CALLS: dict[str, tuple[type[LmkvError], str, Any]] = {
    "lookup of an unknown spec": (
        ModelNotFound,
        "Lookup",
        pb.EngineServiceLookupRequest(fingerprint=bytes(16), chunk_keys=chunk_keys(0)),
    ),
    "lookup of a short key": (
        BadChunkKey,
        "Lookup",
        pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=[b"short"]),
    ),
    "an empty lookup": (ModelNotFound, "Lookup", pb.EngineServiceLookupRequest()),
    "load of an unknown spec": (
        ModelNotFound,
        "Load",
        pb.LoadRequest(fingerprint=b"x", chunk_keys=chunk_keys(0)),
    ),
    "load of a short key": (BadChunkKey, "Load", pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=[b"short"])),
    "release of an unknown engine": (
        EngineNotFound,
        "Release",
        pb.EngineServiceReleaseRequest(engine_id="unknown", lookup_id="1"),
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
async def test_a_bad_call_gets_its_documented_status_and_the_node_serves_on(
    node: Node, engine: EngineClient, case: str
) -> None:
    error_class, method, request = BAD_CALLS[case]
    error = await failure(getattr(engine.stub, method)(request, timeout=ANSWER_SECONDS))
    assert type(error) is error_class, error
    await engine.store(chunk_keys(0))
    assert len((await engine.lookup("1", chunk_keys(0))).own) == 1


async def test_a_call_over_the_limit_is_refused_and_the_node_serves_on(node: Node, engine: EngineClient) -> None:
    socket = f"unix:{node.config.engine_socket}"
    async with unlimited(socket) as channel:
        method = channel.unary_unary("/lmkv.v1.EngineService/Lookup")
        with pytest.raises(grpc.RpcError) as raised:
            await method(bytes(rpc.MAX_MESSAGE_BYTES + 1), timeout=ANSWER_SECONDS)
        code: Any = raised.value
        assert code.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not (await engine.lookup("1", chunk_keys(0))).own
