"""`EngineService` of a real node over its real unix socket."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import grpc
import pytest

from lmkv import rpc
from lmkv.config import NodeConfig, keys
from lmkv.config.resolve import to_environment
from lmkv.errors import (
    BadChunkKey,
    BadKvSpec,
    BadMessage,
    ConfigConflict,
    GrantNotFound,
    LmkvError,
)
from lmkv.keys import join_keys
from lmkv.spec import MAX_FIELD_BYTES
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import ServedModel
from lmkv.v1.registry_service_pb2 import SpecConflict
from lmkv_server.node.engines import service as engine_service
from lmkv_server.node.node import Node
from tests.attach import acts, request
from tests.server.node.cases import chunk_key, chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.engines.pool_checks import CAPACITY, LIMIT, SPEC, is_clean, unlimited
from tests.support.specs import small_spec
from tests.waiting import until


async def test_an_engine_is_welcomed_with_what_it_needs_to_know(node: Node) -> None:
    client = EngineClient(node)
    await client.say(hello=pb.Hello(engine_id="e", spec=SPEC.to_proto(), worker_count=1))
    welcome = await client.welcome()
    assert (welcome.instance_id, welcome.epoch, welcome.node_pid) == ("test-node", node.epoch, os.getpid())
    assert welcome.pool_socket == str(node.config.pool_socket)
    assert welcome.pool_size_bytes == node.pool.size_bytes
    assert welcome.credit_limit == LIMIT
    assert node.engines.attached_count == 1
    await client.aclose()


async def test_a_miss_is_an_answer_and_brings_credits(engine: EngineClient) -> None:
    found = await engine.lookup("1", chunk_keys(0, 1, 2), reserve_count=5)
    assert not found.own
    assert not absent_count(found)
    granted = await engine.hear("credits")
    assert len(granted) == 5
    assert {credit.extent.size_bytes for credit in granted} == {SPEC.chunk_bytes}
    assert await engine.hear("settled") == [5]


@pytest.mark.parametrize(("wanted", "granted"), [(5, 3), (2, 0), (1, 0)])
async def test_each_chunk_that_is_found_makes_one_credit_fewer(
    node: Node, engine: EngineClient, wanted: int, granted: int
) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("1", chunk_keys(0, 1, 2), reserve_count=wanted)
    assert await engine.hear("settled") == [wanted], "what was asked for is settled, granted or not"
    assert node.engines.session("engine").credit_count == granted


async def test_what_was_committed_is_found_where_it_was_written(node: Node, engine: EngineClient) -> None:
    granted = await engine.reserve(2)
    commits = [engine.commit(chunk_key(number), one, checksum=number) for number, one in enumerate(granted)]
    await engine.say(commit=commits)
    found = await engine.lookup("1", chunk_keys(0, 1, 2))
    assert [(one.extent.offset, one.checksum, one.extent.size_bytes, one.token_count) for one in found.own] == [
        (one.offset, number, SPEC.chunk_bytes, SPEC.chunk_size) for number, one in enumerate(granted)
    ]
    held = [node.tier.get(chunk_key(number)) for number in (0, 1)]
    assert [one.generation for one in found.own] == [one.generation for one in held if one]
    assert node.engines.session("engine").credit_count == 0


async def test_a_chunk_whose_successor_is_there_is_not_evicted(node: Node, engine: EngineClient) -> None:
    head, tail, *_ = granted = await engine.reserve(2)
    assert len(granted) == 2
    await engine.say(commit=[engine.commit(chunk_key(0), head), engine.commit(chunk_key(1), tail, parent=chunk_key(0))])
    await engine.lookup("1", chunk_keys(0, 1))
    await engine.release("1")
    await engine.lookup("2", chunk_keys(1))  # were it for times of use alone, the head would go first
    await engine.release("2")
    await until(lambda: not node.engines.session("engine").lease_count)
    while chunk_key(1) in {chunk.key for chunk in node.tier}:
        assert chunk_key(0) in {chunk.key for chunk in node.tier}
        assert node.tier.reserve(SPEC.chunk_bytes)
    assert [chunk.key for chunk in node.tier] == [chunk_key(0)]


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("arc", True)])
async def test_the_configured_policy_decides_who_makes_room(config: NodeConfig, policy: str, stays: bool) -> None:
    async with Node(replace(config, eviction_policy=policy)) as node, EngineClient(node) as engine:
        await engine.store(chunk_keys(0))
        await engine.lookup("1", chunk_keys(0))
        await engine.release("1")
        for number in range(1, 2 * CAPACITY):  # a scan: each is stored once and never asked for
            await engine.store(chunk_keys(number))
        assert len((await engine.lookup("2", chunk_keys(0))).own) == stays


async def test_the_acts_of_one_message_are_carried_out_in_the_order_of_its_list(engine: EngineClient) -> None:
    await engine.store(chunk_keys(0))
    await engine.lookup("1", chunk_keys(0))
    first, second = await engine.reserve(2)
    both = join_keys(chunk_keys(0, 1))
    before, after = (pb.Act(lookup=pb.LookupChunks(lookup_id=name, chunk_keys=both)) for name in ("2", "3"))
    others = acts(
        release=[pb.ReleaseChunks(lookup_id="1")],
        commit=[engine.commit(chunk_key(1), first)],
        return_credits=[second.offset],
    )
    await engine.call.write(pb.AttachRequest(acts=[before, *others, after]))
    found = await engine.hear("found")
    assert [(one.lookup_id, len(one.own)) for one in found] == [("2", 1), ("3", 2)]


async def test_answers_are_events_in_the_order_of_the_acts(engine: EngineClient) -> None:
    kinds = ["reserve", "lookup", "reserve", "reset"]
    key = chunk_key(1)
    made = {
        "reserve": pb.Act(reserve=pb.ReserveCredits(counts=[1])),
        "lookup": pb.Act(lookup=pb.LookupChunks(lookup_id="1", chunk_keys=key)),
        "reset": pb.Act(reset=pb.ResetChunks()),
    }
    await engine.call.write(pb.AttachRequest(acts=[made[kind] for kind in kinds]))
    heard: list[str | None] = []
    while len(heard) < len(kinds):
        heard += [event.WhichOneof("event") for event in (await engine._read()).events]
    assert heard == ["granted", "found", "granted", "reset"]


UNKNOWN_ACT = pb.AttachRequest.FromString(bytes.fromhex("0a04fa3f0178"))  # of field 1023, as of a later version


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (UNKNOWN_ACT, r"field 1023 of lmkv\.v1\.Act, which this node does not know: update the node"),
        (pb.AttachRequest(acts=[pb.Act()]), "an act is empty"),
    ],
    ids=["of a later version", "empty"],
)
async def test_an_act_that_the_node_does_not_know_ends_the_stream_after_those_before_it(
    node: Node, engine: EngineClient, message: pb.AttachRequest, complaint: str
) -> None:
    (granted,) = await engine.reserve(1)
    known = acts(commit=[engine.commit(chunk_key(1), granted)])
    await engine.call.write(pb.AttachRequest(acts=[*known, *message.acts, pb.Act(reset=pb.ResetChunks())]))
    error = await engine.ending()
    assert isinstance(error, BadMessage)
    assert re.search(complaint, str(error))
    assert node.tier.get(chunk_key(1)), "the acts before it were carried out, those behind it were not"


async def test_credits_end_at_the_limit_and_every_request_is_settled(engine: EngineClient) -> None:
    granted = await engine.reserve(LIMIT + 7)
    assert len(granted) == LIMIT
    assert await engine.reserve(3) == []
    await engine.say(return_credits=[one.offset for one in granted[:2]])
    assert len(await engine.reserve(3)) == 2


async def test_a_lookup_holds_its_chunks_until_it_is_released(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.lookup("1", chunk_keys(0, 1))
    assert [chunk.holds for chunk in node.tier] == [1, 1]
    await engine.release("1")
    await engine.release("never was")
    await engine.lookup("1", chunk_keys(5))
    assert [chunk.holds for chunk in node.tier] == [0, 0]


async def test_a_lookup_that_found_nothing_needs_no_release(node: Node, engine: EngineClient) -> None:
    await engine.lookup("1", chunk_keys(0))
    assert node.engines.session("engine").lease_count == 0


async def test_of_two_engines_that_store_one_chunk_the_second_gets_no_error_and_loses_nothing(node: Node) -> None:
    async with EngineClient(node, "one") as one, EngineClient(node, "two") as two:
        await one.store(chunk_keys(0))
        await two.store(chunk_keys(0))
        found = await two.lookup("1", chunk_keys(0))
        assert len(found.own) == 1
        assert not two.heard["rejected_commit"]
        assert node.tier.used_bytes == SPEC.chunk_bytes
        assert node.engines.session("two").credit_count == 0


async def test_engines_of_one_spec_share_chunks_and_of_another_do_not(node: Node) -> None:
    other = small_spec(model_id="other-weights")
    async with EngineClient(node, "one") as one, EngineClient(node, "other", other) as two:
        await one.store(chunk_keys(0))
        await two.store(chunk_keys(1))
        await one.lookup("1", chunk_keys(0))
        await one.say(reset=True)
        assert await one.hear("reset") == [1]
        assert len((await two.lookup("1", chunk_keys(1))).own) == 1


async def test_an_engine_with_other_weights_stores_under_another_spec_and_loses_no_credit(
    node: Node, engine: EngineClient
) -> None:
    await engine.store(chunk_keys(0))
    (granted,) = await engine.reserve(1)
    await engine.say(change_weights="2", serve_models=[ServedModel(name="model")])
    await engine.say(commit=[engine.commit(chunk_key(1), granted)])
    assert len((await engine.lookup("1", chunk_keys(1))).own) == 1
    second = replace(SPEC, weight_version="2")
    assert {chunk.key: chunk.fingerprint for chunk in node.tier} == {
        chunk_key(0): SPEC.fingerprint,
        chunk_key(1): second.fingerprint,
    }
    described = node.describe()
    assert [spec.weight_version for spec in described.specs] == ["", "2"]
    assert second.fingerprint in {model.fingerprint for model in described.served_models}
    await engine.say(reset=True)
    assert await engine.hear("reset") == [1], "a reset is of the version of now"


async def test_an_engine_with_other_weights_gets_changes_of_its_spec_of_now(node: Node) -> None:
    async with EngineClient(node, "stores") as other, EngineClient(node, "follows", wants_tier_changes=True) as engine:
        await other.store(chunk_keys(0))
        (change,) = await engine.hear("tier_change")
        assert change.stored_keys == [chunk_key(0)]
        await engine.say(change_weights="2")
        (change,) = await engine.hear("tier_change")
        assert (change.restarted, list(change.stored_keys)) == (True, [])
        await engine.store(chunk_keys(1))
        (change,) = await engine.hear("tier_change")
        assert change.stored_keys == [chunk_key(1)]


async def test_what_private_weights_have_computed_is_unknown_to_the_fleet_and_ends_with_them(
    node: Node, engine: EngineClient
) -> None:
    await engine.say(change_weights="private:1")
    await engine.store(chunk_keys(0))
    await engine.lookup("1", chunk_keys(0))
    await engine.release("1")
    assert [spec.weight_version for spec in node.describe().specs] == [""]
    await engine.say(change_weights="2")
    await until(lambda: not list(node.tier))
    assert [spec.weight_version for spec in node.engines.specs] == ["", "2"]


async def test_a_version_that_is_too_long_is_refused(engine: EngineClient) -> None:
    await engine.say(change_weights="x" * (MAX_FIELD_BYTES + 1))
    with pytest.raises(grpc.RpcError, match="weight_version has more than 512 bytes"):
        await engine.hear("found")


async def test_a_partial_chunk_is_found_as_what_it_is(engine: EngineClient) -> None:
    (extent,) = await engine.reserve(1)
    commit = pb.CommitChunk(chunk_key=chunk_key(0), offset=extent.offset, size_bytes=SPEC.size_bytes(5), token_count=5)
    await engine.say(commit=[commit])
    (found,) = (await engine.lookup("1", chunk_keys(0))).own
    assert (found.extent.size_bytes, found.token_count) == (SPEC.size_bytes(5), 5)


async def test_chunks_that_an_engine_found_damaged_are_dropped(node: Node, engine: EngineClient) -> None:
    await engine.store(chunk_keys(0, 1))
    await engine.say(drop_damaged=[chunk_key(0)])
    found = await engine.lookup("1", chunk_keys(0, 1))
    assert not found.own
    assert len(node.tier) == 1


async def test_conflicts_are_reported_to_every_engine(node: Node, engine: EngineClient) -> None:
    conflict = SpecConflict(instance_id="other", model_name="small", field="kv_dtype")
    node.conflicts_changed([conflict])
    assert await engine.hear("conflicts") == [conflict]


# ---- refusals that leave the stream as it is


async def rejected(engine: EngineClient, commit: pb.CommitChunk) -> LmkvError:
    await engine.say(commit=[commit])
    (answer,) = await engine.hear("rejected_commit")
    assert answer.chunk_key == commit.chunk_key
    return rpc.from_status(answer.status)


async def test_a_commit_without_credit_is_rejected_and_the_stream_continues(node: Node, engine: EngineClient) -> None:
    commit = pb.CommitChunk(
        chunk_key=chunk_key(0), offset=4096, size_bytes=SPEC.chunk_bytes, token_count=SPEC.chunk_size
    )
    assert isinstance(await rejected(engine, commit), GrantNotFound)
    assert len(node.tier) == 0
    await engine.store(chunk_keys(0))
    assert len((await engine.lookup("1", chunk_keys(0))).own) == 1


async def test_a_commit_of_a_wrong_size_is_rejected_and_keeps_its_credit(engine: EngineClient) -> None:
    (extent,) = await engine.reserve(1)
    commit = engine.commit(chunk_key(0), extent)
    commit.size_bytes -= 8
    assert isinstance(await rejected(engine, commit), BadMessage)
    await engine.say(commit=[engine.commit(chunk_key(0), extent)])
    assert len((await engine.lookup("1", chunk_keys(0))).own) == 1


async def test_returning_a_foreign_credit_is_rejected_and_the_stream_continues(
    node: Node, engine: EngineClient
) -> None:
    await engine.store(chunk_keys(0))
    (chunk,) = (await engine.lookup("1", chunk_keys(0))).own
    await engine.say(return_credits=[chunk.extent.offset, 12345])
    assert len((await engine.lookup("2", chunk_keys(0))).own) == 1
    node.tier.check()


@pytest.mark.parametrize("first_chunk", [0, 1])
async def test_a_load_of_what_no_lookup_found_ends_at_once(engine: EngineClient, first_chunk: int) -> None:
    await engine.store(chunk_keys(0))
    await engine.lookup("1", chunk_keys(0, 1))
    load = pb.LoadChunks(lookup_id="1" if not first_chunk else "2", first_chunk=first_chunk, chunk_count=1)
    await engine.say(load=[load])
    (loaded,) = await engine.hear("loaded")
    assert loaded.done
    assert not loaded.chunks
    assert loaded.status.code


async def test_a_load_without_holders_ends_at_once(engine: EngineClient) -> None:
    await engine.store(chunk_keys(0))
    await engine.lookup("1", chunk_keys(0, 1))
    load = pb.LoadChunks(lookup_id="1", first_chunk=1, chunk_count=1)
    load.timeout.FromSeconds(600)
    await engine.say(load=[load])
    (loaded,) = await engine.hear("loaded")
    assert (loaded.lookup_id, loaded.done, len(loaded.chunks)) == ("1", True, 0)
    assert loaded.status.code


# ---- refusals that end the stream


def hello(**fields: Any) -> pb.Hello:
    values: dict[str, Any] = {"engine_id": "bad", "spec": SPEC.to_proto(), "worker_count": 1}
    return pb.Hello(**(values | fields))


LYING = SPEC.to_proto()
LYING.fingerprint = bytes(16)
LARGE = small_spec(layer_count=2 * CAPACITY)
UNKNOWN = SPEC.to_proto()
UNKNOWN.kv_dtype = "int3"
PACKED = join_keys(chunk_keys(0))

BAD_STREAMS: dict[str, tuple[type[LmkvError], list[pb.AttachRequest]]] = {
    "nothing": (BadMessage, []),
    "no hello": (BadMessage, [request(reserve=1)]),
    "an empty hello": (BadKvSpec, [request(hello=pb.Hello(engine_id="bad"))]),
    "no engine id": (BadMessage, [request(hello=hello(engine_id=""))]),
    "an engine id in use": (BadMessage, [request(hello=hello(engine_id="good"))]),
    "a lying fingerprint": (BadKvSpec, [request(hello=hello(spec=LYING))]),
    "an unknown dtype": (BadKvSpec, [request(hello=hello(spec=UNKNOWN))]),
    "chunks larger than the pool": (BadKvSpec, [request(hello=hello(spec=LARGE.to_proto()))]),
    "another configuration": (
        ConfigConflict,
        [request(hello=hello(expected_config={"LMKV_MAX_LOCAL_CPU_SIZE": "5.0"}))],
    ),
    "a key that this node does not know": (
        ConfigConflict,
        [request(hello=hello(expected_config={"LMKV_NEW": "1"}))],
    ),
    "a second hello": (BadMessage, [request(hello=hello()), request(hello=hello(engine_id="b"))]),
    "a bad key list": (
        BadChunkKey,
        [request(hello=hello(), lookup=[pb.LookupChunks(lookup_id="1", chunk_keys=b"short")], reserve=3)],
    ),
    "a bad key in a commit": (
        BadChunkKey,
        [request(hello=hello()), request(commit=[pb.CommitChunk(chunk_key=b"short")])],
    ),
    "a bad damaged key": (BadChunkKey, [request(hello=hello(), drop_damaged=[b"short"])]),
    "a ticket in use": (
        BadMessage,
        [request(hello=hello(), lookup=[pb.LookupChunks(lookup_id="1", chunk_keys=PACKED)] * 2)],
    ),
}


@pytest.mark.parametrize("case", BAD_STREAMS)
async def test_a_stream_that_makes_no_sense_ends_with_its_reason_and_the_node_serves_on(node: Node, case: str) -> None:
    error_class, messages = BAD_STREAMS[case]
    async with EngineClient(node, "good") as good:
        await good.store(chunk_keys(0))
        bad = EngineClient(node)
        for message in messages:
            await bad.call.write(message)
        if not messages:
            await bad.call.done_writing()
        error = await bad.ending()
        assert type(error) is error_class, error
        await bad.aclose()
        assert len((await good.lookup("1", chunk_keys(0))).own) == 1
        await until(lambda: node.engines.mapped_count == 1)
        async with EngineClient(node, "next"):
            assert node.engines.attached_count == 2
    await until(lambda: is_clean(node))


async def test_an_engine_that_says_nothing_is_let_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_service, "HELLO_TIMEOUT_SECONDS", 0.1)
    silent = EngineClient(node)
    assert type(await silent.ending()) is BadMessage
    await silent.aclose()


async def test_a_message_over_the_limit_ends_its_stream_and_no_other(node: Node, engine: EngineClient) -> None:
    """The sender's own limit is lifted: it is the node that must refuse."""
    socket = f"unix:{node.config.engine_socket}"
    async with unlimited(socket) as channel:
        call = channel.stream_stream("/lmkv.v1.EngineService/Attach")()
        big = request(hello=hello(engine_id="x" * rpc.MAX_MESSAGE_BYTES))
        await call.write(big.SerializeToString())
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not (await engine.lookup("1", chunk_keys(0))).own


async def test_a_conflict_names_the_key_both_values_the_process_and_how_busy_it_is(
    node: Node, engine: EngineClient
) -> None:
    other = EngineClient(node, "other", config={"LMKV_NODE_LINGER": "1.0"})
    with pytest.raises(grpc.RpcError) as raised:
        await other.__aenter__()
    error = rpc.from_rpc_error(raised.value)
    assert isinstance(error, ConfigConflict)
    assert error.metadata == {
        "key": "LMKV_NODE_LINGER",
        "expected": "1.0",
        "actual": str(NodeConfig().node_linger),
        "node_pid": str(os.getpid()),
        "engine_count": "1",
        "replaced": "false",
    }
    assert "instance_id" in str(error)
    await other.aclose()


async def test_an_engine_may_expect_exactly_what_the_node_has(node: Node) -> None:
    expected = to_environment(node.config)
    assert len(expected) == len(keys(NodeConfig))
    async with EngineClient(node, config=expected):
        assert node.engines.attached_count == 1
