"""Hints of requests in vLLM's real scheduler: what the node is sent, and what the response says of each action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from lmkv.hints import MAX_ACTIONS, HintReason
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, split_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as pb
from tests.client.connector.scheduler.serving import DECODED, PROMPT, forget_pages
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK, MODELS

MakeEngine = Callable[..., SimulatedEngine]


def action(kind: str, action_id: str = "a", **payload: object) -> dict[str, Any]:
    return {"action_id": action_id, "action_type": kind, "action_version": "1.0", "payload": payload}


def envelope(*actions: object) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def hinted(*actions: object) -> dict[str, Any]:
    """The `kv_transfer_params` of a request with these actions."""
    return {"lmkv": {"kv_hints": envelope(*actions)}}


def report(engine: SimulatedEngine, request_id: str = "a") -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = engine.transfer_params[request_id]["lmkv"]["kv_hints"]
    return outcomes


def serve(engine: SimulatedEngine, *actions: object, output: int = 2) -> list[dict[str, Any]]:
    """Serves a request with hints; the outcomes in its response."""
    engine.add("a", PROMPT, output=output, transfer=hinted(*actions))
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()
    return report(engine)


def test_a_hint_is_sent_for_the_prompt_and_again_for_prompt_and_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    (outcome,) = serve(engine, action("kv.pin", ttl=7))
    assert outcome == {"action_id": "a", "action": "pin", "outcome": "deferred", "ttl": 7.0}
    first, last = engine.node.hints
    assert (first.action, first.running, first.ttl.seconds) == (chunk_pb2.HINT_ACTION_PIN, True, 7)
    assert (last.action, last.running, last.hint_id) == (first.action, False, first.hint_id)
    prompt, whole = split_keys(first.chunk_keys), split_keys(last.chunk_keys)
    assert len(prompt) == len(whole) == 4
    assert prompt[:3] == whole[:3]
    assert prompt[3] != whole[3], "the last chunk has tokens of the answer, too"
    assert set(whole) <= set(engine.node.commits)
    assert len(first.root_key) == 16


def test_the_last_hint_of_a_request_follows_its_last_commit(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    committed: list[set[ChunkKey]] = []
    answer = engine.node.on_hint

    def on_hint(hint: pb.HintChunks) -> pb.HintedChunks | None:
        committed.append(set(engine.node.commits))
        return answer(hint)

    engine.node.on_hint = on_hint
    serve(engine, action("evict"))
    assert set(split_keys(engine.node.hints[-1].chunk_keys)) <= committed[-1]


def test_a_hint_about_the_first_tokens_has_their_chunks_only(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    serve(engine, action("retain", token_count=2 * CHUNK + 5, priority=9))
    assert [len(split_keys(hint.chunk_keys)) for hint in engine.node.hints] == [2, 2]
    assert {hint.priority for hint in engine.node.hints} == {9}


def test_a_hint_about_the_first_tokens_has_the_window_there_stored(make_engine: MakeEngine) -> None:
    """Prompts that begin with these tokens hit all of them."""
    engine = make_engine(model=MODELS["gemma3: windows in two groups"], block_count=200)
    prompt = [*PROMPT, *PROMPT, *PROMPT]
    shared = 3 * CHUNK
    assert len(prompt) > 6 * CHUNK
    engine.add("a", prompt, output=2, transfer=hinted(action("retain", token_count=shared)))
    engine.run("a")
    forget_pages(engine)
    other = [*prompt[:shared], *[1] * CHUNK]
    assert engine.serve("b", other) == len(other) - shared + DECODED
    engine.check_nothing_is_left()


def test_tokens_of_another_prompt_get_keys_under_the_salt_of_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    other = list(range(500, 500 + CHUNK + 1))
    engine.add("a", PROMPT, salt="mine", transfer=hinted(action("evict", tokens=other)))
    engine.run("a")
    (hint,) = engine.node.hints
    keys = chunk_keys(as_tokens(other), ChunkKey(hint.root_key), CHUNK, partial=True)
    assert split_keys(hint.chunk_keys) == keys
    assert not hint.running
    assert report(engine)[0]["outcome"] == "accepted"
    engine.add("b", PROMPT, transfer=hinted(action("evict", tokens=other)))
    engine.run("b")
    assert engine.node.hints[-1].root_key != hint.root_key
    engine.check_nothing_is_left()


def test_hints_of_callers_in_the_same_process_are_read_from_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = KvHintAction(action_id="x", action_type="pin", action_version="1.0", payload={"ttl": 5})
    engine.add("a", PROMPT, kv_hints=KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[one]))
    engine.run("a")
    assert [(hint["action_id"], hint["outcome"]) for hint in report(engine)] == [("x", "deferred")]
    assert engine.transfer_params["a"]["lmkv"]["instance_id"] == "node"
    engine.check_nothing_is_left()


def test_the_outcome_of_the_node_is_in_the_response(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def on_hint(hint: pb.HintChunks) -> pb.HintedChunks:
        rejected = chunk_pb2.HINT_OUTCOME_REJECTED
        result = chunk_pb2.HintResult(outcome=rejected, reason=chunk_pb2.HINT_REASON_QUOTA, detail="full")
        return pb.HintedChunks(hint_id=hint.hint_id, result=result)

    engine.node.on_hint = on_hint
    (outcome,) = serve(engine, action("pin"))
    assert outcome == {"action_id": "a", "action": "pin", "outcome": "rejected", "reason": "quota", "detail": "full"}
    assert len(engine.node.hints) == 1, "a rejected hint is not repeated"


def test_a_clipped_ttl_is_reported_as_clipped(make_engine: MakeEngine) -> None:
    engine = make_engine()
    accepted = chunk_pb2.HINT_OUTCOME_ACCEPTED
    engine.node.on_hint = lambda hint: pb.HintedChunks(
        hint_id=hint.hint_id, result=chunk_pb2.HintResult(outcome=accepted, ttl=hint.ttl, chunk_count=3)
    )
    (outcome,) = serve(engine, action("pin", ttl=10**18))
    assert (outcome["outcome"], outcome["ttl"], outcome["chunk_count"]) == ("clipped", 86_400.0, 3)


def test_an_answer_that_does_not_arrive_is_a_deferral(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.on_hint = lambda _hint: None
    (outcome,) = serve(engine, action("pin"))
    assert outcome["outcome"] == "deferred"


@pytest.mark.parametrize(
    "hints",
    [
        None,
        [],
        "pin",
        7,
        {},
        {"protocol_version": "9", "actions": []},
        envelope(*[action("pin", str(at)) for at in range(MAX_ACTIONS + 1)]),
        envelope(*[None] * 100_000),
        envelope(action("kv.fetch")),
        envelope(action("pin") | {"action_version": "7"}),
        envelope(action("pin", ttl=-(2**63))),
        envelope(action("pin", tokens=[2**32])),
        envelope(action("pin", tokens=[1] * 300_000)),
        envelope(action("pin", "\ud800")),
        envelope(action("pin", token_count=1)),
    ],
)
def test_hostile_hints_cost_nothing_but_the_hint(make_engine: MakeEngine, hints: object) -> None:
    engine = make_engine()
    engine.add("a", PROMPT, transfer={"lmkv": {"kv_hints": hints}})
    engine.run("a")
    engine.check_answer("a")
    engine.check_nothing_is_left()
    assert not engine.node.hints
    outcomes = engine.transfer_params["a"]["lmkv"].get("kv_hints", [])
    assert [outcome["outcome"] for outcome in outcomes] == ["rejected"] * (hints is not None)
    assert len(str(outcomes)) < 1000
    str(outcomes).encode()


def test_a_request_without_hints_gets_no_report(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.serve("a", PROMPT)
    assert "a" not in engine.transfer_params
    engine.add("b", PROMPT, transfer=hinted())
    engine.run("b")
    assert engine.transfer_params["b"] == {"lmkv": {"instance_id": "node"}}


def test_without_a_node_and_without_keys_hints_are_rejected(make_engine: MakeEngine) -> None:
    engine = make_engine(attached=False)
    (outcome,) = serve(engine, action("pin"))
    assert outcome["reason"] == HintReason.NO_NODE
    engine.node.attach()
    engine.add("b", PROMPT[: CHUNK // 2], transfer=hinted(action("pin")))
    engine.run("b")
    assert report(engine, "b")[0]["reason"] == HintReason.BAD_PAYLOAD


def test_an_engine_that_accepts_no_hints_rejects_each(make_engine: MakeEngine) -> None:
    engine = make_engine(accept_hints=False)
    (outcome,) = serve(engine, action("pin"))
    assert (outcome["outcome"], outcome["reason"]) == ("rejected", "disabled")
    assert not engine.node.hints


def test_a_lost_node_ends_the_hints_that_it_was_sent(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.node.prompt = False
    engine.add("a", PROMPT, transfer=hinted(action("pin")))
    engine.node.lose()
    engine.run("a")
    assert report(engine)[0]["reason"] == HintReason.NO_NODE
    engine.check_nothing_is_left()


def test_a_hint_that_waits_for_the_last_chunk_ends_with_the_node(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.workers[0].reports_late = True
    engine.add("a", PROMPT, transfer=hinted(action("pin")))
    engine.run("a")
    assert engine.side._hints._ended, "it is repeated once all is written"
    engine.node.lose()
    engine.node.attach()
    engine.settle()
    assert [hint.running for hint in engine.node.hints] == [True]
    engine.check_nothing_is_left()


def test_hints_of_an_aborted_request_leave_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=64)
    engine.add("a", PROMPT, transfer=hinted(action("evict"), action("prefetch", "b")))
    engine.step()
    engine.abort("a")
    engine.check_nothing_is_left()
    assert [hint.running for hint in engine.node.hints] == [True, False, False]


def test_hints_are_counted_by_action_and_outcome(make_engine: MakeEngine) -> None:
    engine = make_engine()
    serve(engine, action("pin"), action("evict", "b"), action("prefetch", "c"), action("dance", "d"))
    counts = {name: engine.count(f"hints:{name}") for name in ("pin:deferred", "evict:deferred", "prefetch:accepted")}
    assert counts == dict.fromkeys(counts, 1)
    assert engine.count("hints:unknown:rejected") == 1
