"""`LookupService` over a socket: what nodes find of each other's chunks, and what is refused."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from lmkv.errors import LmkvError
from lmkv.internal.v1.lookup_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest
from lmkv.internal.v1.lookup_service_pb2_grpc import LookupServiceStub
from lmkv.keys import join_keys
from lmkv.rpc.error_status import from_rpc_error, from_status
from lmkv_server.coordinator.services.lookups import MAX_ALTERNATIVES
from tests.server.coordinator.cases import PROMPT, QWEN, keys_of
from tests.server.coordinator.services.test_cache import ROOT, holds
from tests.support.specs import LLAMA


@pytest.fixture
def nodes(channel: grpc.aio.Channel) -> Any:
    """A stub for what nodes ask."""
    return LookupServiceStub(channel)


async def lookup(nodes: Any, **fields: Any) -> LookupResponse:
    response: LookupResponse = await nodes.Lookup(LookupRequest(**fields), timeout=60)
    return response


async def refused(nodes: Any, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await lookup(nodes, **fields)
    return from_rpc_error(caught.value)


def found(response: LookupResponse) -> dict[str, tuple[int, int]]:
    return {h.instance_id: (h.matched_chunk_count, h.matched_token_count) for h in response.holders}


async def test_packed_keys_find_the_other_instances(registry: Any, nodes: Any) -> None:
    keys = join_keys(keys_of(PROMPT))
    _a, _b = await holds(registry, "a", keys_of(PROMPT)), await holds(registry, "b", keys_of(PROMPT)[:1])
    response = await lookup(nodes, chunk_keys=keys, excluded_instance_id="a")
    assert found(response) == {"b": (1, 16)}
    assert found(await lookup(nodes, chunk_keys=keys, fingerprint=LLAMA.fingerprint)) == {"a": (3, 48), "b": (1, 16)}
    assert found(await lookup(nodes, chunk_keys=keys, fingerprint=QWEN.fingerprint)) == {}
    assert (await refused(nodes, chunk_keys=keys[:-1])).reason == "BAD_CHUNK_KEY"


async def test_a_stream_of_nodes_answers_each_lookup_or_says_what_is_wrong_with_it(registry: Any, nodes: Any) -> None:
    keys = join_keys(keys_of(PROMPT))
    _a = await holds(registry, "a", keys_of(PROMPT))
    stream = nodes.LookupStream(timeout=60)
    asked = (LookupRequest(chunk_keys=keys), LookupRequest(chunk_keys=keys[:-1]), LookupRequest(chunk_keys=keys[:16]))
    await stream.write(LookupStreamRequest(requests=asked))
    first, wrong, last = (await stream.read()).results
    assert [found(one.response) for one in (first, last)] == [{"a": (3, 48)}, {"a": (1, 16)}]
    assert from_status(wrong.error).reason == "BAD_CHUNK_KEY"
    stream.cancel()


async def test_keys_with_a_parent_find_the_lengths_behind_the_longest_match(registry: Any, nodes: Any) -> None:
    keys = keys_of(PROMPT)
    _a = await holds(registry, "a", keys, last_tokens=8, parent=keys[1])
    _b = await holds(registry, "b", keys_of(PROMPT[:5]), last_tokens=5, parent=ROOT)
    packed = join_keys([*keys[:2], b"n" * 16])
    response = await lookup(nodes, chunk_keys=packed, parent_key=ROOT)
    assert (found(response), list(response.partial_token_counts)) == ({"a": (2, 32)}, [8])
    response = await lookup(nodes, chunk_keys=b"n" * 16, parent_key=ROOT)
    assert (found(response), list(response.partial_token_counts)) == ({}, [5])
    assert not (await lookup(nodes, chunk_keys=packed)).partial_token_counts
    error = await refused(nodes, chunk_keys=packed, parent_key=b"short")
    assert (error.reason, "parent_key" in str(error)) == ("BAD_CHUNK_KEY", True)


async def test_of_alternatives_the_first_that_is_held_is_found(registry: Any, nodes: Any) -> None:
    keys = keys_of(PROMPT)
    _a = await holds(registry, "a", keys[:2])
    _b = await holds(registry, "b", keys[1:2])
    packed = join_keys([b"n" * 16, keys[1], keys[0]])
    response = await lookup(nodes, chunk_keys=packed, any_key=True)
    assert (found(response), response.key_index) == ({"a": (1, 16), "b": (1, 16)}, 1)
    response = await lookup(nodes, chunk_keys=packed[:16], any_key=True)
    assert (found(response), response.key_index) == ({}, 0)
    error = await refused(nodes, chunk_keys=b"k" * 16 * (MAX_ALTERNATIVES + 1), any_key=True)
    assert error.reason == "BAD_CHUNK_KEY"
