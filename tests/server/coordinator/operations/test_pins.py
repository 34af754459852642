"""Pins over a socket: set, listed, ended, and known again after a restart of the coordinator."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from lmkv import rpc
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.errors import LmkvError
from lmkv.rpc.error_status import from_rpc_error
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import ListPinsRequest, PinRequest, UnpinRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import PinnedChunks, Position
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import pins
from tests.server.coordinator.cases import CHUNKS, KEYS, PROMPT, keys_of
from tests.server.coordinator.scripted_instance import Make, ScriptedInstance
from tests.support.prompts import with_prompt
from tests.support.specs import LLAMA


async def pin(cache: Any, instance_id: str = "a", **fields: Any) -> PinnedChunks:
    fields.setdefault("tokens", PROMPT)
    fields.setdefault("position", Position(instance_id=instance_id))
    request = PinRequest(**with_prompt(**fields))
    response = await cache.Pin(request, timeout=60)
    pinned: PinnedChunks = response.pin
    return pinned


async def refused(cache: Any, *args: str, **fields: Any) -> LmkvError:
    with pytest.raises(grpc.RpcError) as caught:
        await pin(cache, *args, **fields)
    return from_rpc_error(caught.value)


async def listed(cache: Any, **fields: Any) -> list[str]:
    response = await cache.ListPins(ListPinsRequest(**fields), timeout=60)
    return [each.pin_id for each in response.pins]


async def test_a_pin_says_what_is_kept_where_and_until_when(make: Make, cache: Any) -> None:
    async with make("a", KEYS[:2]) as a:
        before = time.time()
        pinned = await pin(cache)
        assert pinned.pin_id.startswith("a/")
        assert pinned.position == Position(instance_id="a", tier=HOST)
        assert (pinned.chunk_count, pinned.token_count) == (2, 32)
        assert before + 299 < pinned.expire_time.ToNanoseconds() / 1e9 < time.time() + 301
        assert list(a.pins) == [pinned.pin_id] == await listed(cache)


@pytest.mark.parametrize("names", [{"model_name": "adapter"}, {"lora_name": "adapter"}])
async def test_a_prompt_of_an_adapter_is_pinned_by_the_adapters_name(
    make: Make, cache: Any, names: dict[str, str]
) -> None:
    of_adapter = keys_of(PROMPT, lora="adapter@1")
    async with make("a", [*of_adapter, *KEYS], served={"adapter": "adapter@1"}) as a:
        assert (await pin(cache, **names)).chunk_count == 3
        assert list(a.pinned.values()) == [of_adapter]


async def test_a_repeated_request_id_is_the_same_pin_with_a_new_ttl(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS):
        first = await pin(cache, request_id="once", ttl=Duration(seconds=10))
        again = await pin(cache, request_id="once", ttl=Duration(seconds=100))
        assert again.pin_id == first.pin_id
        assert again.expire_time.seconds > first.expire_time.seconds + 80
        assert (await pin(cache)).pin_id != first.pin_id


async def test_an_unpin_ends_it_and_may_be_repeated(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a:
        pinned = await pin(cache)
        for _ in range(2):
            await cache.Unpin(UnpinRequest(pin_id=pinned.pin_id), timeout=60)
        assert a.pins == {}
        assert await listed(cache) == []


async def test_an_unpin_of_a_pin_that_never_existed_is_refused(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS):
        for unknown in ("", "nonsense", "unknown/123"):
            with pytest.raises(grpc.RpcError) as caught:
                await cache.Unpin(UnpinRequest(pin_id=unknown), timeout=60)
            error = from_rpc_error(caught.value)
            assert (error.reason, error.metadata["pin_id"]) == ("PIN_NOT_FOUND", unknown)


async def test_pins_are_listed_in_pages_and_by_instance(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS), make("b", CHUNKS):
        pin_ids = sorted([(await pin(cache, name)).pin_id for name in ("a", "b", "a", "b", "a")])
        first = await cache.ListPins(ListPinsRequest(page_size=2), timeout=60)
        assert [each.pin_id for each in first.pins] == pin_ids[:2]
        rest = await cache.ListPins(ListPinsRequest(page_token=first.next_page_token), timeout=60)
        assert [each.pin_id for each in rest.pins] == pin_ids[2:]
        assert rest.next_page_token == ""
        assert await listed(cache, instance_id="b") == pin_ids[3:]


async def test_pins_that_expired_are_not_listed(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS):
        await pin(cache, ttl=Duration(nanos=1))
        assert await listed(cache) == []


async def test_a_restarted_coordinator_learns_of_pins_from_their_owners(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS) as a:
        pinned = await pin(cache)
        async with (
            Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as another,
            rpc.open_channel(another.address) as channel,
        ):
            successor = ScriptedInstance(channel, {}, "a", LLAMA, CHUNKS)
            successor.pins, successor.pinned = a.pins, a.pinned
            async with successor:
                stub: Any = CacheServiceStub(channel)
                assert await listed(stub) == [pinned.pin_id]
                await stub.Unpin(UnpinRequest(pin_id=pinned.pin_id), timeout=60)
                assert successor.pins == {}


async def test_what_cannot_be_pinned_says_why(make: Make, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make("a", CHUNKS) as a:
        assert (await refused(cache, "unknown")).reason == "INSTANCE_NOT_FOUND"
        assert (await refused(cache, tokens=[])).reason == "BAD_SELECTION"
        assert (await refused(cache, ttl=Duration(seconds=-1))).reason == "BAD_SELECTION"
        assert (await refused(cache, tokens=[1, 2])).reason == "CHUNK_NOT_FOUND"
        for tier, reason in (("disk", "TIER_UNSUPPORTED"), ("cellar", "BAD_SELECTION")):
            error = await refused(cache, position=Position(instance_id="a", tier=tier))
            assert (error.reason, repr(tier) in str(error)) == (reason, True)
        monkeypatch.setattr(pins, "TIMEOUT_SECONDS", 0.05)
        a.going.clear()
        assert (await refused(cache)).reason == "UNREACHABLE"


@pytest.mark.parametrize(
    ("seconds", "nanos"),
    [(-(2**63), 0), (2**63 - 1, 0), (315_576_000_001, 0), (1, 1_000_000_000), (0, -(2**31)), (1, -1)],
)
async def test_a_ttl_out_of_the_range_of_durations_is_an_invalid_argument(
    make: Make, cache: Any, seconds: int, nanos: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with make("a", CHUNKS) as a:
        error = await refused(cache, ttl=Duration(seconds=seconds, nanos=nanos))
        assert (error.code, error.reason, error.metadata["field"]) == ("INVALID_ARGUMENT", "BAD_MESSAGE", "ttl")
        assert a.pins == {}
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_ttl_of_a_pin_is_capped(make: Make, cache: Any) -> None:
    async with make("a", CHUNKS):
        pinned = await pin(cache, ttl=Duration(seconds=315_576_000_000))
        assert time.time() < pinned.expire_time.seconds < time.time() + 86_410
