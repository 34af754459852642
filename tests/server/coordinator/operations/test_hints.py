"""Hints over a socket: what the instance is asked, and what is refused before it is."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv.errors import LmkvError
from lmkv.keys import join_keys
from lmkv.rpc.error_status import from_rpc_error
from lmkv.v1 import chunk_pb2
from lmkv.v1.cache_service_pb2 import HintRequest, HintResponse
from tests.server.coordinator.cases import KEYS, PROMPT, keys_of
from tests.server.coordinator.scripted_instance import Make
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA


async def hint(cache: Any, action: int = chunk_pb2.HINT_ACTION_PIN, **fields: Any) -> HintResponse:
    request = HintRequest(**with_prompt(**({"instance_id": "a", "tokens": PROMPT} | fields)), action=action)  # type: ignore[arg-type]
    response: HintResponse = await cache.Hint(request, timeout=60)
    return response


async def refused(cache: Any, *args: Any, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await hint(cache, *args, **fields)
    return from_rpc_error(caught.value)


async def test_an_instance_is_asked_by_keys_and_its_answer_is_returned(make: Make, cache: Any) -> None:
    async with make("a", KEYS) as a:
        response = await hint(cache, chunk_pb2.HINT_ACTION_RETAIN, ttl=Duration(seconds=60), priority=7)
        assert (response.result.outcome, response.result.chunk_count) == (chunk_pb2.HINT_OUTCOME_ACCEPTED, 3)
        assert response.pin_id == ""
        (order,) = a.orders
        assert order.hint.chunk_keys == join_keys(KEYS)
        assert order.hint.fingerprint == LLAMA.fingerprint
        assert (order.hint.action, order.hint.priority) == (chunk_pb2.HINT_ACTION_RETAIN, 7)
        assert order.hint.ttl.seconds == 60
        assert len(order.hint.owner) == 16


async def test_a_pin_is_named_and_the_same_request_names_the_same(make: Make, cache: Any) -> None:
    async with make("a", KEYS) as a:
        first = await hint(cache, request_id="x")
        again = await hint(cache, request_id="x")
        other = await hint(cache)
        assert first.pin_id == again.pin_id != other.pin_id
        assert first.pin_id.startswith("a/")
        assert first.pin_id == f"a/{a.orders[0].hint.hint_id}"


async def test_what_is_left_out_has_its_default(make: Make, cache: Any) -> None:
    async with make("a", KEYS) as a:
        await hint(cache, chunk_pb2.HINT_ACTION_RETAIN)
        await hint(cache, chunk_pb2.HINT_ACTION_EVICT)
        retain, evict = (order.hint for order in a.orders)
        assert (retain.ttl.seconds, retain.priority) == (300, 50)
        assert (evict.HasField("ttl"), evict.priority) == (False, 0)


async def test_a_hint_about_chunks_that_no_instance_holds_is_missing(make: Make, cache: Any) -> None:
    async with make("a") as a:
        response = await hint(cache, chunk_pb2.HINT_ACTION_EVICT)
        assert (response.result.outcome, response.pin_id) == (chunk_pb2.HINT_OUTCOME_MISSING, "")
        unknown = await hint(cache, chunk_pb2.HINT_ACTION_PREFETCH, tokens=(), chunk_keys=join_keys(KEYS))
        assert unknown.result.outcome == chunk_pb2.HINT_OUTCOME_MISSING
        assert len(a.orders) == 1, "no instance has reported the spec of these keys"


async def test_a_salt_makes_other_keys(make: Make, cache: Any) -> None:
    salted = keys_of(PROMPT, cache_salt="pepper")
    async with make("a", KEYS) as a:
        response = await hint(cache, chunk_pb2.HINT_ACTION_EVICT, cache_salt="pepper")
        assert response.result.outcome == chunk_pb2.HINT_OUTCOME_MISSING
        assert a.orders[0].hint.chunk_keys == join_keys(salted)


@pytest.mark.parametrize(
    ("action", "fields", "reason"),
    [
        (0, {}, "BAD_SELECTION"),
        (99, {}, "BAD_SELECTION"),
        (3, {"tokens": ()}, "BAD_SELECTION"),
        (3, {"instance_id": "nowhere"}, "INSTANCE_NOT_FOUND"),
        (3, {"ttl": Duration(seconds=-1)}, "BAD_SELECTION"),
        (3, {"ttl": Duration()}, "BAD_SELECTION"),
        (3, {"ttl": Duration(seconds=-(2**63))}, "BAD_MESSAGE"),
        (3, {"ttl": Duration(seconds=10**18)}, "BAD_MESSAGE"),
        (4, {"priority": 101}, "BAD_SELECTION"),
        (4, {"priority": -1}, "BAD_SELECTION"),
        (3, {"tokens": (), "chunk_keys": b"x"}, "BAD_CHUNK_KEY"),
        (3, {"tokens": (), "chunk_keys": bytes(16 * 32_769)}, "BAD_SELECTION"),
        (3, {"tokens": [-1]}, "BAD_TOKENS"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    make: Make, cache: Any, action: int, fields: dict[str, Any], reason: str
) -> None:
    async with make("a", KEYS) as a:
        assert (await refused(cache, action, **fields)).reason == reason
        assert not a.orders
