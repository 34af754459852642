"""The last tokens of requests, in vLLM's real scheduler: stored when requests end, and hit to the last one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from lmkv.keys import KeyChain, as_tokens, root_key
from tests.client.connector.scheduler.serving import DECODED, PROMPT, REST, MakeEngine, forget_pages, until
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK

OUTPUT = 30
STORED = len(PROMPT) + OUTPUT - 1
"""Tokens of an answered prompt that have KV: the last one is never computed."""
MESSAGE = list(range(400, 450))

MakeChat = Callable[..., SimulatedEngine]


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def make_chat(request: pytest.FixtureRequest, make_engine: MakeEngine) -> MakeChat:
    """Makes an engine that has answered the prompt as `a` and forgotten its pages."""

    def make(**options: object) -> SimulatedEngine:
        engine = make_engine(**{"save_partial_chunks": True, "enable_async_loading": request.param} | options)
        engine.serve("a", PROMPT, output=OUTPUT)
        forget_pages(engine)
        return engine

    return make


def next_turn(engine: SimulatedEngine, request_id: str) -> list[int]:
    prompt = engine.requests[request_id].prompt_token_ids
    assert prompt is not None
    return [*prompt, *engine.said[request_id], *MESSAGE]


def test_the_next_turn_computes_only_what_is_new(make_chat: MakeChat) -> None:
    engine = make_chat()
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - STORED + DECODED
    forget_pages(engine)
    later = next_turn(engine, "b")
    assert engine.serve("c", later, output=4) == len(later) - (len(turn) + DECODED) + 3
    engine.check_nothing_is_left()


def test_a_turn_that_comes_while_vllm_has_the_whole_blocks_loads_the_tokens_behind_them(make_chat: MakeChat) -> None:
    engine = make_chat(min_retrieve_tokens=1)
    turn = next_turn(engine, "a")
    engine.serve("b", turn[: STORED // BLOCK * BLOCK + 1])
    before = engine.count("loaded_tokens")
    assert engine.serve("c", turn) == len(turn) - STORED + DECODED
    assert engine.count("loaded_tokens") - before == STORED % BLOCK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_turn_that_comes_before_the_step_that_stores_the_tail_waits_for_it(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = make_engine(save_partial_chunks=True, enable_async_loading=asynchronous, min_retrieve_tokens=1)
    engine.serve("a", PROMPT, output=OUTPUT)
    assert engine.side.has_tails
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - STORED + DECODED
    assert engine.count("loaded_tokens") == STORED % BLOCK
    engine.check_nothing_is_left()


@pytest.mark.parametrize("event", ["abort", "lose"])
def test_a_lookup_that_waits_for_a_tail_ends_with_its_request_or_its_node(make_engine: MakeEngine, event: str) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=OUTPUT)
    lookups = len(engine.node.lookups)
    engine.add("b", next_turn(engine, "a"))
    assert len(engine.node.lookups) == lookups
    if event == "abort":
        engine.abort("b")
    else:
        engine.node.lose()
    engine.settle()
    assert len(engine.node.lookups) == lookups
    engine.check_nothing_is_left()


def test_the_tail_comes_from_a_peer(make_chat: MakeChat) -> None:
    engine = make_chat()
    engine.node.move_to_peer()
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - STORED + DECODED
    assert engine.count("tier_tokens:peers") == STORED
    engine.check_nothing_is_left()


def test_tails_take_extents_of_exactly_their_size(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=OUTPUT)
    engine.settle()
    assert engine.node.partial_grants == [REST, STORED % CHUNK]
    assert [engine.node.chunks[key].token_count for key in engine.node.commits[-2:]] == [REST, STORED % CHUNK]
    assert not engine.node.credits_out, "an idle engine keeps none"
    engine.check_nothing_is_left()


@pytest.mark.parametrize("running", [False, True])
def test_pages_stay_until_the_node_has_answered_with_a_credit(make_engine: MakeEngine, running: bool) -> None:
    engine = make_engine(save_partial_chunks=True, lookup_timeout=0.001)
    free = engine.free_block_count
    engine.serve("a", PROMPT, output=OUTPUT - 1)
    engine.settle()
    engine.node.prompt = False
    engine.add("b", PROMPT, output=OUTPUT)
    if running:
        engine.add("c", [5, *PROMPT], output=3 * OUTPUT)
    engine.run("b")
    for _ in range(3):
        engine.step()
    assert engine.side.has_tails
    assert engine.free_block_count < free
    engine.node.prompt = True
    engine.node.answer()
    until(engine, lambda: STORED % CHUNK in [engine.node.chunks[key].token_count for key in engine.node.commits])
    engine.run()
    engine.settle()
    assert engine.free_block_count == free
    assert engine.count("skipped_chunks") == 0
    engine.check_nothing_is_left()


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("reports_late", [False, True])
def test_a_request_of_more_chunks_than_credits_is_stored_as_a_whole_when_it_has_ended(
    make_engine: MakeEngine, rank_count: int, reports_late: bool
) -> None:
    """The node of a small pool grants a third of it at a time."""
    engine = make_engine(save_partial_chunks=True, credit_limit=12, block_count=256, rank_count=rank_count)
    for worker in engine.workers:
        worker.reports_late = reports_late
    prompt = list(range(28 * CHUNK + REST))
    engine.serve("a", prompt)
    engine.settle()
    assert sorted(chunk.token_count for chunk in engine.node.chunks.values())[-28:] == [CHUNK] * 28
    assert engine.count("skipped_chunks") == 0
    forget_pages(engine)
    assert engine.serve("b", prompt) <= REST + DECODED
    engine.check_nothing_is_left()


def test_a_request_that_workers_do_not_store_ends_although_it_has_more_chunks_than_credits(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(save_partial_chunks=True, credit_limit=3, block_count=256)
    engine.workers[0].skips_stores = True
    engine.serve("a", list(range(28 * CHUNK)))
    engine.settle()
    assert not engine.node.chunks
    engine.check_nothing_is_left()


def test_a_node_that_refuses_a_credit_costs_the_tail_only(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.node.grants_partial = False
    engine.serve("a", PROMPT, output=OUTPUT)
    engine.settle()
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK] * 3
    assert engine.count("skipped_chunks") == 1
    engine.check_nothing_is_left()


def test_a_node_that_does_not_answer_keeps_pages_for_a_second_at_most(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, lookup_timeout=0.001)
    free = engine.free_block_count
    engine.node.prompt = False
    engine.serve("a", PROMPT, output=OUTPUT)
    assert engine.side.has_tails
    engine.clock.now += 1
    engine.step()
    engine.step()
    assert not engine.side.has_tails
    assert engine.free_block_count == free
    assert engine.count("skipped_chunks") > 0
    engine.serve("b", [9, *PROMPT])
    engine.settle()
    engine.serve("c", [8, *PROMPT])
    engine.check_nothing_is_left()


def test_weights_that_change_before_a_tail_is_stored_cost_the_tail_only(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=OUTPUT)
    assert engine.side.has_tails
    count = len(engine.node.commits)
    engine.change_weights("others")
    engine.serve("b", [9, *PROMPT])
    assert len(engine.node.commits) == count + 3 + 1
    engine.check_nothing_is_left()


def test_a_handed_prompt_is_stored_to_its_end_by_the_step_that_computes_it(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.node.pool_is_full = True
    engine.add("a", PROMPT, output=OUTPUT, transfer={"lmkv": {"handoff_id": "r", "decode_instance": "decode"}})
    until(engine, lambda: len(engine.said["a"]) > 0)
    assert [engine.node.chunks[key].token_count for key in engine.node.commits] == [CHUNK] * 3 + [REST]
    engine.run("a")
    engine.check_nothing_is_left()


def test_a_decoded_chunk_needs_no_credit_ahead(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=2 * CHUNK)
    engine.settle()
    assert engine.count("skipped_chunks") == 0
    turn = next_turn(engine, "a")
    forget_pages(engine)
    assert engine.serve("b", turn) == len(turn) - (len(PROMPT) + 2 * CHUNK - 1) + DECODED
    engine.check_nothing_is_left()


def test_a_tail_supersedes_the_end_of_the_prompt_and_is_superseded_by_what_continues_it(make_chat: MakeChat) -> None:
    engine = make_chat()
    *_, prompt_end, tail = engine.node.commits
    assert engine.node.superseded == {tail: prompt_end}
    third = engine.node.commits[2]
    assert {engine.node.parents[key] for key in (prompt_end, tail)} == {third}
    engine.serve("b", next_turn(engine, "a"))
    engine.settle()
    fourth, end, _ = engine.node.commits[5:]
    assert engine.node.superseded[fourth] == tail, "a full chunk that begins with it"
    assert end not in engine.node.superseded
    engine.check_nothing_is_left()


def test_the_end_of_a_prompt_is_stored_before_its_answer_and_both_say_how_they_begin(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=OUTPUT)
    engine.settle()
    ends = [commit for commit in engine.node.commit_messages if commit.token_count < CHUNK]
    assert [commit.token_count for commit in ends] == [REST, STORED % CHUNK]
    prompt_end, answer_end = (commit.prefix_digests for commit in ends)
    assert answer_end.startswith(prompt_end)
    assert [len(prompt_end), len(answer_end)] == [8 * REST, 8 * (STORED % CHUNK)]
    assert [one[-8:] for one in (prompt_end, answer_end)] == [commit.chunk_key[:8] for commit in ends]
    engine.check_nothing_is_left()


@pytest.mark.parametrize("length", [5, CHUNK])
def test_a_full_chunk_says_how_it_begins_if_a_prompt_has_ended_in_it(make_engine: MakeEngine, length: int) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", list(range(50, 50 + length)), output=2 * CHUNK)
    engine.settle()
    full = [commit for commit in engine.node.commit_messages if commit.token_count == CHUNK]
    assert [len(commit.prefix_digests) // 8 for commit in full] == [0 if length == CHUNK else CHUNK, 0]
    assert full[0].parent_key == (engine.node.lookups[-1].root_key if length < CHUNK else b"")
    engine.check_nothing_is_left()


@pytest.mark.parametrize("output", [1, OUTPUT])
def test_what_vllm_has_itself_and_the_pool_has_lost_is_stored_again(make_engine: MakeEngine, output: int) -> None:
    engine, prompt = make_engine(save_partial_chunks=True), [*PROMPT, *range(1000)]
    engine.serve("a", prompt)
    engine.settle()
    engine.node.evict()
    engine.node.chunks.clear()
    engine.serve("b", prompt, output=output)
    engine.settle()
    stored = [chunk.token_count for chunk in engine.node.chunks.values()]
    assert stored.count(CHUNK) == (len(prompt) + output - 1) // CHUNK
    assert engine.count("skipped_chunks") == 0
    engine.check_nothing_is_left()


def test_a_pool_with_room_keeps_the_end_of_a_prompt_too(make_chat: MakeChat) -> None:
    engine = make_chat()
    assert engine.serve("b", PROMPT) == 1 + DECODED
    engine.check_nothing_is_left()


def test_a_longer_tail_supersedes_the_one_that_was_loaded(make_chat: MakeChat) -> None:
    engine = make_chat()
    tail = engine.node.commits[-1]
    engine.serve("b", next_turn(engine, "a")[: STORED + 3], output=1)
    engine.settle()
    assert engine.node.superseded[engine.node.commits[-1]] == tail
    engine.check_nothing_is_left()


def test_the_tail_of_a_chat_shorter_than_a_chunk_is_behind_the_root_of_its_keys(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT[:12], output=10)
    forget_pages(engine)
    root = root_key(engine.kv.spec.fingerprint)
    assert [engine.node.parents[key] for key in engine.node.commits] == [root, root]
    chain = KeyChain(root, CHUNK)
    assert engine.node.commits[-1] == chain.behind(0, as_tokens([*PROMPT[:12], *engine.said["a"][:9]]))
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - 21 + DECODED
    engine.check_nothing_is_left()


def test_an_answer_that_fills_its_last_chunk_has_no_partial_chunk(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=CHUNK - REST + 1)
    engine.settle()
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK] * 3 + [REST, CHUNK]
    engine.check_nothing_is_left()


def test_without_save_decode_cache_only_the_prompt_is_stored_to_its_end(make_chat: MakeChat) -> None:
    engine = make_chat(save_decode_cache=False)
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK] * 3 + [REST]
    turn = next_turn(engine, "a")
    assert engine.serve("b", turn) == len(turn) - len(PROMPT) + DECODED
    engine.check_nothing_is_left()


def test_what_found_no_credit_before_is_stored_at_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, credit_limit=1)
    engine.node.prompt = False
    engine.add("a", PROMPT, output=2)
    engine.node.answer()
    engine.node.generous = True
    engine.step()
    engine.node.prompt = True
    engine.node.answer()
    engine.run("a")
    engine.settle()
    assert engine.node.commits
    engine.check_nothing_is_left()


def test_an_aborted_request_stores_no_tail(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", PROMPT, output=OUTPUT)
    until(engine, lambda: len(engine.said["a"]) > 5)
    engine.abort("a")
    engine.settle()
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK] * 3 + [REST]
    engine.check_nothing_is_left()


def test_pages_stay_until_the_tail_is_stored(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, block_count=12)
    free = engine.free_block_count
    engine.serve("a", PROMPT, output=OUTPUT)
    pages = -(-STORED // BLOCK)
    assert engine.free_block_count == free - pages
    engine.add("b", [9, *PROMPT[: (12 - pages) * BLOCK]])  # does not fit beside it
    engine.step()
    assert engine.scheduled_tokens["b"] == 0
    assert [chunk.token_count for chunk in engine.node.chunks.values()] == [CHUNK] * 3 + [REST, STORED % CHUNK]
    engine.run("b")
    engine.check_answer("b")
    engine.check_nothing_is_left()


@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_node_that_is_lost_while_a_tail_is_stored_costs_only_the_tail(
    make_engine: MakeEngine, moment: str, rank_count: int
) -> None:
    engine = make_engine(save_partial_chunks=True, rank_count=rank_count)
    engine.serve("a", PROMPT, output=OUTPUT)
    before = list(engine.node.commits)
    if moment == "before":
        engine.node.lose()
    elif moment == "during":
        engine.during_step = lambda: engine.node.lose() if engine.node.attached else None
    engine.step()
    if moment == "after":
        engine.node.lose()
        before = list(engine.node.commits)
    engine.during_step = lambda: None
    engine.node.attach(restarted=False)
    engine.settle()
    assert engine.node.commits == before
    assert engine.serve("b", next_turn(engine, "a")) > 0
    engine.check_nothing_is_left()


def test_a_tail_that_a_worker_has_skipped_does_no_harm(make_chat: MakeChat) -> None:
    engine = make_chat()
    engine.serve("b", next_turn(engine, "a"))
    engine.workers[0].skips_stores = True
    count = len(engine.node.commits)
    engine.settle()
    assert len(engine.node.commits) == count
    engine.workers[0].skips_stores = False
    forget_pages(engine)
    engine.serve("c", next_turn(engine, "b"))
    engine.check_nothing_is_left()


@pytest.mark.parametrize("moment", range(0, 12, 2))
def test_turns_that_are_aborted_at_any_moment_leave_nothing(make_chat: MakeChat, moment: int) -> None:
    engine = make_chat()
    engine.workers[0].steps_per_load = 2
    engine.add("b", next_turn(engine, "a"), output=4)
    engine.add("c", [5, *PROMPT], output=6)
    for _ in range(moment):
        engine.step()
    if not engine.requests["b"].is_finished():
        engine.abort("b")
    engine.run("c")
    engine.check_answer("c")
    engine.check_nothing_is_left()


def test_preempted_requests_store_tails_that_are_right(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True, block_count=16)
    for number in range(3):
        engine.add(str(number), [number, *PROMPT[:100]], output=3 * BLOCK)
    engine.run()
    assert any(request.num_preemptions for request in engine.requests.values())
    engine.settle()
    for number in range(3):
        engine.check_answer(str(number))
        forget_pages(engine)
        turn = next_turn(engine, str(number))
        assert engine.serve(f"{number} again", turn) == len(turn) - (101 + 3 * BLOCK - 1) + DECODED
    engine.check_nothing_is_left()


def test_lookups_have_the_tokens_and_what_else_is_in_the_keys(make_engine: MakeEngine) -> None:
    engine = make_engine(save_partial_chunks=True)
    engine.add("a", PROMPT, images=[("cat", 70, 20)])
    (lookup,) = engine.node.lookups
    assert lookup.tokens == as_tokens(PROMPT).tobytes()
    assert lookup.root_key == root_key(engine.kv.spec.fingerprint)
    assert list(lookup.chunk_extras) == [1]
    engine.run("a")
    engine.check_nothing_is_left()


def test_without_partial_chunks_lookups_have_keys_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", PROMPT)
    (lookup,) = engine.node.lookups
    assert (lookup.tokens, lookup.root_key) == (b"", b"")
    engine.run("a")
    engine.check_nothing_is_left()


def test_the_log_has_one_line_for_all_that_is_stored_of_a_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored in several steps; the end of the prompt is superseded by what was generated behind it."""
    caplog.set_level(logging.INFO, "vllm.lmkv")
    engine = make_engine(save_partial_chunks=True)
    engine.serve("a", PROMPT, output=OUTPUT)
    assert not stores_in(caplog), "its end is not written yet"
    engine.settle()
    (line,) = stores_in(caplog)
    assert line.startswith(f"[a] Stored {STORED} tokens (prompt: {len(PROMPT)}), ")
    assert engine.count("stored_tokens") > STORED
    engine.check_nothing_is_left()


def stores_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about stores."""
    return [text for record in caplog.records if "Stored" in (text := record.getMessage())]
