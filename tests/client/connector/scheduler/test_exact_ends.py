"""Exact ends of prompts with windows and local chunks: the next turn of a chat computes nothing that a turn before has.

Every step checks that each page that it reads has the KV of its own prompt, as in `test_several_groups`.
"""

from __future__ import annotations

import pytest

from lmkv.keys import split_keys
from lmkv.prompt import HeldKeys, Prompt, match
from lmkv.v1.chunk_pb2 import PART_RULE_END
from tests.client.connector.scheduler.serving import DECODED, MakeEngine, forget_pages
from tests.client.connector.scheduler.several_groups import PROMPT, engine_of, every_model, one_of_each_kind
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import CHUNK

MESSAGE = list(range(300, 350))
OUTPUT = 30


def engine_with_ends(make_engine: MakeEngine, name: str, **options: object) -> SimulatedEngine:
    return engine_of(make_engine, name, **{"save_partial_chunks": True} | options)


def hit_of(engine: SimulatedEngine, token_count: int) -> int:
    """The longest hit of these tokens: states are where chunks end."""
    has_states = any(part.rule == PART_RULE_END for part in engine.kv.spec.parts)
    return token_count // CHUNK * CHUNK if has_states else token_count


def next_turn(engine: SimulatedEngine, request_id: str) -> list[int]:
    prompt = engine.requests[request_id].prompt_token_ids
    assert prompt is not None
    return [*prompt, *engine.said[request_id], *MESSAGE]


@every_model
@pytest.mark.parametrize("length", [CHUNK // 2, 2 * CHUNK + 3, 3 * CHUNK, len(PROMPT)])
def test_the_next_turns_compute_only_what_is_new(make_engine: MakeEngine, name: str, length: int) -> None:
    engine = engine_with_ends(make_engine, name)
    engine.serve("a", PROMPT[:length], output=OUTPUT)
    forget_pages(engine)
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - hit_of(engine, length + OUTPUT - 1) + DECODED
    engine.check_answer("b")
    forget_pages(engine)
    later = next_turn(engine, "b")
    computed = engine.serve("c", later, output=4)
    if hit_of(engine, 1):  # vLLM offers states where a step ends: not in each chunk
        assert computed == len(later) - (len(turn) + DECODED) + 3
    engine.check_answer("c")
    engine.check_nothing_is_left()


@one_of_each_kind
def test_a_turn_comes_from_a_peer(make_engine: MakeEngine, name: str) -> None:
    engine = engine_with_ends(make_engine, name)
    engine.serve("a", PROMPT, output=OUTPUT)
    forget_pages(engine)
    engine.node.move_to_peer()
    turn = next_turn(engine, "a")
    engine.add("b", turn)
    engine.run("b")
    engine.check_answer("b")
    assert engine.scheduled_tokens["b"] == len(turn) - hit_of(engine, len(PROMPT) + OUTPUT - 1) + DECODED
    engine.check_nothing_is_left()


@one_of_each_kind
def test_a_turn_without_a_part_of_its_end_is_loaded_to_the_chunk_before(make_engine: MakeEngine, name: str) -> None:
    for part in range(len(engine_with_ends(make_engine, name).kv.spec.parts)):
        engine = engine_with_ends(make_engine, name)
        engine.serve("a", PROMPT, output=OUTPUT)
        forget_pages(engine)
        for key in [key for key, chunk in engine.node.chunks.items() if chunk.token_count < CHUNK]:
            if engine.node.chunks[key].part == part:
                engine.node.drop(key)
        turn = next_turn(engine, "a")
        computed = engine.serve("b", turn)
        engine.check_answer("b")
        assert computed == len(turn) - (len(PROMPT) + OUTPUT - 1) // CHUNK * CHUNK + DECODED
        engine.check_nothing_is_left()


@one_of_each_kind
def test_a_node_that_refuses_credits_costs_the_ends_only(make_engine: MakeEngine, name: str) -> None:
    engine = engine_with_ends(make_engine, name)
    engine.node.grants_partial = False
    engine.serve("a", PROMPT, output=OUTPUT)
    forget_pages(engine)
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - (len(PROMPT) + OUTPUT - 1) // CHUNK * CHUNK + DECODED
    engine.check_answer("b")
    engine.check_nothing_is_left()


@every_model
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("length", [CHUNK // 2, 3 * CHUNK - 1, 3 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK + 2, len(PROMPT)])
def test_a_handoff_brings_a_prompt_but_for_its_last_token(
    make_engine: MakeEngine, name: str, length: int, repeats: bool
) -> None:
    """The decode's request continues after the first token, or repeats it."""
    prompt = PROMPT[:length]
    prefill = engine_with_ends(make_engine, name)
    prefill.add("a", prompt, output=1, transfer={"lmkv": {"handoff_id": "r", "decode_instance": "decode"}})
    prefill.run("a")
    prefill.settle()
    covered = hit_of(prefill, length - 1)
    if not covered:  # of states no whole chunk is there
        assert not prefill.node.handoffs
        return
    (handoff,) = prefill.node.handoffs
    keys = split_keys(handoff.chunk_keys)
    assert (handoff.token_count, len(keys)) == (covered, -(-covered // CHUNK))
    prefill.check_nothing_is_left()

    decode = engine_with_ends(make_engine, name)
    decode.node.peer_chunks = dict(prefill.node.chunks)
    tokens = prompt if repeats else [*prompt, *prefill.said["a"]]
    to_decode = {"handoff_id": "r", "decode_instance": "node", "prompt_token_count": length}
    decode.add("b", tokens, output=5, transfer={"lmkv": to_decode})
    decode.run("b")
    decode.check_answer("b")
    held = Prompt(prefill.kv.spec, keys, token_count=covered)
    loaded = held.end(match(held, HeldKeys(held, prefill.node.chunks)))
    if hit_of(prefill, 1):  # vLLM offers states where a step ends: not in each chunk
        assert loaded == covered
    assert decode.scheduled_tokens["b"] == len(tokens) - loaded + 4
    decode.check_nothing_is_left()


@one_of_each_kind
def test_the_end_that_a_handoff_sends_is_stored_when_its_request_has_ended(make_engine: MakeEngine, name: str) -> None:
    engine = engine_with_ends(make_engine, name)
    engine.node.grants_partial = False
    engine.add("a", PROMPT, output=1, transfer={"lmkv": {"handoff_id": "r", "decode_instance": "decode"}})
    engine.node.grants_partial = True  # from its end on
    engine.run("a")
    engine.settle()
    keys = split_keys(engine.node.handoffs[0].chunk_keys)
    assert keys[-1] in engine.node.ended_handoffs["r"]
    assert {engine.node.chunks[keys[-1]].token_count} == {hit_of(engine, len(PROMPT) - 1) - (len(keys) - 1) * CHUNK}
    engine.check_nothing_is_left()


@every_model
def test_the_same_prompt_ends_a_token_before_it_does(make_engine: MakeEngine, name: str) -> None:
    engine = engine_with_ends(make_engine, name)
    engine.serve("a", PROMPT)
    forget_pages(engine)
    engine.serve("b", PROMPT)
    engine.check_answer("b")
    engine.check_nothing_is_left()
