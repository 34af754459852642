"""Handoffs as two engines see them, each vLLM's real scheduler with a scripted node: a prefill and a decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2

from lmkv.auth.credentials import NO_TOKEN, BearerToken
from lmkv.auth.handoff import LIFETIME_SECONDS, HandoffKeys
from lmkv.keys import KEY_BYTES
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.connector.scheduler.handoff import HandoffParams, HandoffRefused, handoff_of, is_addressed
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK
from tests.client.connector.simulated_worker import answer_of

MakeEngine = Callable[..., SimulatedEngine]

PROMPT = list(range(3, 203))
"""200 tokens: three chunks and 8 tokens, which end inside a page."""
PREFILL = {"lmkv": {"handoff_id": "r", "decode_instance": "decode"}}
DECODE = {"lmkv": {"handoff_id": "r", "decode_instance": "node", "prompt_token_count": len(PROMPT)}}
SECRET = "a-secret-of-the-fleet"
OPEN = HandoffKeys("", NO_TOKEN)
"""The keys of a fleet that has no secret."""


def prefilled(make_engine: MakeEngine, **config: Any) -> SimulatedEngine:
    """An engine that has computed the prompt's first token, and handed the prompt over."""
    engine = make_engine(save_partial_chunks=True, **config)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    engine.run("a")
    engine.settle()
    return engine


def decoding(make_engine: MakeEngine, prefill: SimulatedEngine, **config: Any) -> SimulatedEngine:
    """A decode engine whose node receives the handoffs of the other engine."""
    engine = make_engine(save_partial_chunks=True, **config)
    engine.node.peer_chunks = dict(prefill.node.chunks)
    return engine


# ---- the prefill's part


def test_a_prefill_announces_at_once_and_ends_when_everything_is_committed(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    (handoff,) = engine.node.handoffs
    assert (handoff.handoff_id, handoff.decode_instance_id, handoff.token_count) == ("r", "decode", 200)
    assert len(handoff.chunk_keys) == 4 * KEY_BYTES
    assert not engine.node.ended_handoffs
    engine.run("a")
    engine.settle()
    assert [len(keys) for keys in engine.node.ended_handoffs.values()] == [4]
    assert b"".join(engine.node.ended_handoffs["r"]) == handoff.chunk_keys
    engine.check_nothing_is_left()


def test_a_full_pool_does_not_shorten_a_handoff(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.node.pool_is_full = True
    engine.serve("first", [7] * 5)
    engine.settle()
    before = len(engine.node.commits)
    engine.add("a", PROMPT, output=8, transfer=PREFILL)
    engine.step()
    engine.step()
    assert b"".join(engine.node.commits[before:]) == engine.node.handoffs[0].chunk_keys
    engine.settle()


def test_an_answer_names_the_node_of_the_engine(make_engine: MakeEngine) -> None:
    engine = prefilled(make_engine)
    assert engine.transfer_params == {"a": {"lmkv": {"instance_id": "node"}}}
    engine.add("probe", [1, 2, 3], output=1, transfer={"lmkv": {}})
    engine.add("other", [1, 2, 4], output=1)
    engine.run()
    assert engine.transfer_params["probe"] == engine.transfer_params["a"]
    assert "other" not in engine.transfer_params
    engine.node.lose()
    engine.add("again", [1, 2, 5], output=1, transfer={"lmkv": {}})
    engine.run()
    assert engine.transfer_params["again"] == {"lmkv": {"instance_id": ""}}


def test_without_partial_chunks_handoffs_have_full_ones_only(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=False)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    (handoff,) = engine.node.handoffs
    assert (handoff.token_count, len(handoff.chunk_keys)) == (3 * CHUNK, 3 * KEY_BYTES)


def test_the_handoff_of_an_aborted_prefill_is_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, step_tokens=64)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    engine.step()
    engine.abort("a")
    engine.settle()
    assert not engine.node.ended_handoffs
    assert engine.node.dropped_handoffs == [pb.DropHandoff(handoff_id="r", decode_instance_id="decode")]
    engine.check_nothing_is_left()


def test_a_disabled_cache_keeps_handoffs_only(make_engine: MakeEngine) -> None:
    engine = make_engine(local_cpu=False, save_partial_chunks=True)
    engine.serve("other", [9, *PROMPT])
    assert not engine.node.commits
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    engine.run("a")
    engine.settle()
    assert len(engine.node.commits) == 4


def test_what_became_of_a_handoff_is_counted(make_engine: MakeEngine) -> None:
    engine = prefilled(make_engine)
    handed = pb.HandedChunks(
        handoff_id="r", chunk_count=3, transferred_bytes=1000, transfer_duration=Duration(nanos=5_000_000)
    )
    handed.status.code = code_pb2.UNAVAILABLE
    engine.node.say(pb.Event(handed=handed))
    engine.side.drain_events()
    assert engine.count("handed_tokens") == 3 * CHUNK
    assert engine.count("handed_bytes") == 1000
    assert engine.count("handed_seconds") == pytest.approx(0.005)
    assert engine.count("handoff_failures") == 1
    assert not engine.side._handoffs._states


def test_a_lost_node_loses_its_handoffs_and_nothing_else(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, step_tokens=64)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    engine.step()
    engine.node.lose()
    engine.run("a")
    engine.check_answer("a")
    assert engine.count("handoff_failures") == 1
    engine.check_nothing_is_left()


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("changes_weights", [False, True])
def test_the_handoff_of_a_prefill_that_goes_to_sleep_ends_and_the_next_one_is_complete(
    make_engine: MakeEngine, steps: int, changes_weights: bool
) -> None:
    """From level 2 on other weights may be loaded before the engine wakes up."""
    engine = make_engine(save_partial_chunks=True, step_tokens=64)
    engine.workers[0].reports_late = True
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    for _ in range(steps):
        engine.step()
    engine.sleep()
    if changes_weights:
        engine.change_weights("others")
    assert len(engine.node.ended_handoffs) + len(engine.node.dropped_handoffs) == 1
    assert not engine.node.chunks, "none of the old weights is held"
    engine.wake_up()
    engine.add("b", PROMPT, output=1, transfer={"lmkv": PREFILL["lmkv"] | {"handoff_id": "s"}})
    engine.run("b")
    engine.settle()
    assert b"".join(engine.node.ended_handoffs["s"]).endswith(engine.node.handoffs[-1].chunk_keys)
    assert len(engine.node.handoffs[-1].chunk_keys) == 4 * KEY_BYTES
    engine.check_answer("b")
    engine.check_nothing_is_left()


# ---- the decode's part


@pytest.mark.parametrize("delivered", range(4))
@pytest.mark.parametrize("changes_weights", [False, True])
def test_a_decode_that_goes_to_sleep_while_a_handoff_arrives_uses_nothing_of_it_later(
    make_engine: MakeEngine, delivered: int, changes_weights: bool
) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill)
    decode.node.fetches_at_once = False
    decode.add("a", PROMPT + prefill.said["a"], output=3, transfer=DECODE)
    decode.step()
    for _ in range(delivered):
        decode.node.deliver(1, done=False)
        decode.step()
    decode.during_step = lambda: decode.node.deliver() if decode.node.fetches else None
    decode.sleep()
    decode.during_step = lambda: None
    if changes_weights:
        decode.change_weights("others")
    assert not decode.node.fetches
    decode.wake_up()
    decode.serve("b", PROMPT, output=3)
    decode.check_nothing_is_left()


def test_a_decode_continues_from_the_first_token_and_computes_only_that(make_engine: MakeEngine) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill)
    first = prefill.said["a"]
    decode.add("a", PROMPT + first, output=3, transfer=DECODE)
    decode.run("a")
    assert first + decode.said["a"] == answer_of(PROMPT, 4)
    assert decode.scheduled_tokens["a"] == 3, "the first token, and the two that were decoded and read again"
    assert decode.count("loaded_tokens") == len(PROMPT)
    (lookup,) = decode.node.lookups
    assert lookup.handoff_id == "r"
    decode.check_nothing_is_left()


def test_a_decode_may_repeat_the_first_token(make_engine: MakeEngine) -> None:
    decode = decoding(make_engine, prefilled(make_engine))
    decode.add("a", PROMPT, output=3, transfer=DECODE)
    decode.run("a")
    decode.check_answer("a")
    assert decode.scheduled_tokens["a"] == 3
    decode.check_nothing_is_left()


def test_a_decode_that_is_brought_less_computes_the_rest(make_engine: MakeEngine) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill)
    decode.node.fetches_at_once = False
    decode.add("a", PROMPT + prefill.said["a"], output=3, transfer=DECODE)
    decode.step()
    decode.node.deliver(2, done=False)
    decode.node.fail()
    decode.run("a")
    assert prefill.said["a"] + decode.said["a"] == answer_of(PROMPT, 4)
    assert decode.scheduled_tokens["a"] >= len(PROMPT) - 2 * CHUNK
    decode.check_nothing_is_left()


def test_a_decode_waits_for_a_handoff_longer_than_for_a_peer(make_engine: MakeEngine) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill, load_timeout=0.1, pd_load_timeout=5.0)
    decode.node.fetches_at_once = False
    decode.add("a", PROMPT + prefill.said["a"], output=3, transfer=DECODE)
    decode.step()
    decode.clock.now += 4.0
    decode.step()
    decode.node.deliver()
    decode.run("a")
    assert decode.count("loaded_tokens") == len(PROMPT)
    decode.check_nothing_is_left()


def test_a_decode_does_not_wait_for_ever(make_engine: MakeEngine) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill, pd_load_timeout=5.0)
    decode.node.fetches_at_once = False
    decode.add("a", PROMPT + prefill.said["a"], output=3, transfer=DECODE)
    decode.step()
    decode.clock.now += 5.1
    decode.run("a")
    assert prefill.said["a"] + decode.said["a"] == answer_of(PROMPT, 4)
    decode.check_nothing_is_left()


def test_a_synchronous_decode_loads_the_whole_handoff(make_engine: MakeEngine) -> None:
    prefill = prefilled(make_engine)
    decode = decoding(make_engine, prefill, enable_async_loading=False)
    decode.add("a", PROMPT + prefill.said["a"], output=3, transfer=DECODE)
    decode.run("a")
    assert prefill.said["a"] + decode.said["a"] == answer_of(PROMPT, 4)
    assert decode.count("loaded_tokens") == len(PROMPT)
    decode.check_nothing_is_left()


def test_without_handoffs_the_parameters_mean_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_pd=False, save_partial_chunks=True)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    engine.run("a")
    assert not engine.node.handoffs


@pytest.mark.parametrize("reason", ["reads no caches", "has no chunk", "is no prompt of tokens"])
def test_a_handoff_that_no_lookup_will_load_is_dropped_at_once(make_engine: MakeEngine, reason: str) -> None:
    engine = make_engine(save_partial_chunks=reason != "has no chunk")
    prompt = PROMPT[:8] if reason == "has no chunk" else PROMPT
    resumable: Any = {"resumable": True} if reason == "is no prompt of tokens" else {}
    engine.add("a", prompt, transfer=DECODE, reads_caches=reason != "reads no caches", **resumable)
    assert engine.node.dropped_handoffs == [pb.DropHandoff(handoff_id="r")]


def test_a_handoff_of_no_tokens_is_dropped_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", [1], output=1, transfer={"lmkv": DECODE["lmkv"] | {"prompt_token_count": 0}})
    assert engine.node.dropped_handoffs == [pb.DropHandoff(handoff_id="r")]
    assert [lookup.handoff_id for lookup in engine.node.lookups] == [""]
    engine.run("a")
    engine.check_nothing_is_left()


def test_an_answer_says_why_its_handoff_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", PROMPT, output=1, transfer=PREFILL)
    handed = pb.HandedChunks(handoff_id="r")
    handed.status.code, handed.status.message = code_pb2.NOT_FOUND, "no such instance"
    engine.node.say(pb.Event(handed=handed))
    engine.run("a")
    assert engine.transfer_params["a"]["lmkv"]["handoff_refused"] == "no such instance"
    engine.add("off", PROMPT, output=1, transfer={"lmkv": PREFILL["lmkv"] | {"prompt_token_count": -1}})
    engine.run("off")
    assert "number of tokens" in engine.transfer_params["off"]["lmkv"]["handoff_refused"]
    assert not engine.side._handoffs._refusals


# ---- who may ask for a handoff


def vouched(params: dict[str, Any], secret: str = SECRET, now: float | None = None, **changes: Any) -> dict[str, Any]:
    """The parameters with the proof of a proxy that has this secret, made before the changes."""
    said = params["lmkv"]
    proof = HandoffKeys("", BearerToken(text=secret)).prove(said["handoff_id"], said["decode_instance"], now)
    return {"lmkv": said | proof | changes}


@pytest.mark.parametrize("params", [PREFILL, DECODE])
def test_what_a_proxy_of_the_fleet_has_vouched_for_takes_place(make_engine: MakeEngine, params: dict[str, Any]) -> None:
    engine = make_engine(save_partial_chunks=True, auth_token=SECRET)
    engine.add("a", PROMPT, output=1, transfer=vouched(params))
    assert len(engine.node.handoffs) + sum(bool(lookup.handoff_id) for lookup in engine.node.lookups) == 1
    engine.run("a")
    engine.check_answer("a")


@pytest.mark.parametrize("params", [PREFILL, DECODE])
@pytest.mark.parametrize(
    ("proof", "why"),
    [
        (lambda params: params, "no proof of a proxy of this fleet"),
        (lambda params: vouched(params, "another-secret"), "another secret"),
        (lambda params: vouched(params, handoff_id="other"), "another secret"),
        (lambda params: vouched(params, decode_instance="other"), "another secret"),
        (lambda params: vouched(params, expire_time=4_000_000_000), "another secret"),
        (lambda params: vouched(params, now=time.time() - LIFETIME_SECONDS - 2), "expired"),
        (lambda params: vouched(params, expire_time=-1), "malformed"),
        (lambda params: vouched(params, expire_time="soon"), "no proof of a proxy of this fleet"),
        (lambda params: vouched(params, mac="\ud800"), "malformed"),
        (lambda params: vouched(params, mac=["00"]), "no proof of a proxy of this fleet"),
        (lambda params: vouched(params, mac=""), "no proof of a proxy of this fleet"),
    ],
)
def test_a_handoff_without_a_valid_proof_is_refused(
    make_engine: MakeEngine, params: dict[str, Any], proof: Callable[[dict[str, Any]], dict[str, Any]], why: str
) -> None:
    engine = make_engine(save_partial_chunks=True, auth_token=SECRET)
    engine.add("a", PROMPT, output=1, transfer=proof(params))
    engine.run("a")
    engine.check_answer("a")
    assert why in engine.transfer_params["a"]["lmkv"]["handoff_refused"]
    assert SECRET not in engine.transfer_params["a"]["lmkv"]["handoff_refused"]
    assert not engine.node.handoffs
    assert not engine.node.dropped_handoffs
    assert [lookup.handoff_id for lookup in engine.node.lookups] == [""]
    assert engine.count("handoff_failures") == 1


def test_a_decode_takes_no_handoff_of_another_instance(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", PROMPT, output=1, transfer={"lmkv": DECODE["lmkv"] | {"decode_instance": "other"}})
    assert [lookup.handoff_id for lookup in engine.node.lookups] == [""]


def test_a_token_vouches_where_there_is_no_cluster_secret_and_may_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-token")
    proxy, engine = HandoffKeys("", BearerToken(text="first-token")), HandoffKeys("", BearerToken(file=str(file)))
    proof = proxy.prove("r", "decode")
    assert not engine.refusal("r", "decode", proof["expire_time"], proof["mac"])
    file.write_text("the-second-token")
    assert "another secret" in engine.refusal("r", "decode", proof["expire_time"], proof["mac"])
    both = HandoffKeys(SECRET, BearerToken(text="the-second-token"))
    for keys in (both, HandoffKeys("", BearerToken(text="the-second-token")), HandoffKeys(SECRET, NO_TOKEN)):
        proof = keys.prove("r", "decode")
        assert not both.refusal("r", "decode", proof["expire_time"], proof["mac"])
    assert OPEN.prove("r", "decode") == {}


# ---- what clients may write there


@pytest.mark.parametrize(
    "params",
    [
        {"lmkv": {"handoff_id": 5, "decode_instance": "d"}},
        {"lmkv": {"handoff_id": "", "decode_instance": "d"}},
        {"lmkv": {"handoff_id": "r" * 1000, "decode_instance": "d"}},
        {"lmkv": {"handoff_id": "r\nforged", "decode_instance": "d"}},
        {"lmkv": {"handoff_id": "\ud800", "decode_instance": "d"}},
        {"lmkv": {"handoff_id": "r", "decode_instance": ["d"]}},
        {"lmkv": {"handoff_id": "r", "decode_address": "10.6.6.6:1"}},
        {"lmkv": {"handoff_id": "r", "decode_instance": "d", "prompt_token_count": "many"}},
        {"lmkv": {"handoff_id": "r", "decode_instance": "d", "prompt_token_count": -1}},
        {"lmkv": {"handoff_id": "r", "decode_instance": "d", "prompt_token_count": True}},
        {"lmkv": {"handoff_id": "r"}},
    ],
)
def test_parameters_that_make_no_sense_cost_the_request_its_handoff_and_no_more(
    make_engine: MakeEngine, params: dict[str, Any]
) -> None:
    with pytest.raises(HandoffRefused, match="kv_transfer_params"):
        handoff_of(params, OPEN)
    engine = make_engine()
    engine.add("a", PROMPT, transfer=params)
    engine.run("a")
    engine.check_answer("a")
    assert not engine.node.handoffs
    engine.check_nothing_is_left()


@pytest.mark.parametrize("params", [None, {}, {"lmkv": 7}, {"lmkv": {}}, {"do_remote_decode": True}])
def test_parameters_of_others_say_nothing(params: dict[str, Any] | None) -> None:
    assert handoff_of(params, OPEN) is None
    assert is_addressed(params) == (params == {"lmkv": {}})


def test_both_parts_are_read() -> None:
    assert handoff_of(PREFILL, OPEN) == HandoffParams(handoff_id="r", decode_instance="decode")
    assert handoff_of(DECODE, OPEN) == HandoffParams(handoff_id="r", decode_instance="node", prompt_token_count=200)
