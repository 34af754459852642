"""Completions are the same wherever the KV comes from. In float32, so that equal means equal.

`engine-1` loads asynchronously and prefills in one go, `engine-2` loads synchronously and prefills in pieces.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt, poison

pytestmark = pytest.mark.engine

REPORT_TIMEOUT_SECONDS = 60.0
ENGINES = ("engine-1", "engine-2")
OTHER = {"engine-1": "engine-2", "engine-2": "engine-1"}


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """Both engines with their nodes and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("engine-1")
        fleet.add("engine-2", {"enable_async_loading": "false"}, max_num_batched_tokens=300)
        fleet.start()
        yield fleet


@pytest.fixture(params=ENGINES)
def engine(fleet: LlmFleet, request: pytest.FixtureRequest) -> LlmProcess:
    """Each of the two."""
    return fleet.engines[request.param]


def test_a_prompt_from_the_own_pool_is_answered_as_a_computed_one(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    expected = engine.compute(prompt)
    first = engine.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
    for _ in range(2):
        again = engine.ask_again(prompt)
        assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (expected, 768, 0)
        assert again.cached_tokens == 768
        assert again.stored_tokens == 0, "what the pool holds is not stored again"


def test_a_prompt_from_a_peer_is_answered_as_a_computed_one(fleet: LlmFleet, engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 1500)
    stored_by(fleet, OTHER[engine.name], prompt, 1280)
    expected = engine.compute(prompt)
    first = engine.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.peer_tokens) == (expected, 1280, 1280)
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (expected, 1280, 0)


def test_a_prompt_that_is_half_here_and_half_at_a_peer_is_put_together(
    fleet: LlmFleet, engine: LlmProcess, seed: int
) -> None:
    prompt = make_prompt(seed, 1500)
    assert engine.ask(prompt[:600]).stored_tokens == 512
    stored_by(fleet, OTHER[engine.name], prompt, 1280)
    answers = engine.ask_again(prompt)
    assert (answers.loaded_tokens, answers.peer_tokens) == (1280, 768)
    assert answers.token_ids == engine.compute(prompt)


def test_blocks_that_vllm_has_itself_are_not_loaded(engine: LlmProcess, seed: int) -> None:
    """Three blocks of 128 tokens are vLLM's own: ours begin in the middle of a chunk."""
    prompt = make_prompt(seed, 1000)
    expected = engine.compute(prompt)
    engine.ask(prompt)
    engine.ask_again(make_prompt(seed + 1, 500, prefix=prompt[:400]))
    answers = engine.ask(prompt)
    assert (answers.token_ids, answers.cached_tokens, answers.loaded_tokens) == (expected, 768, 768 - 384)


def test_a_prompt_of_whole_chunks_keeps_a_token_to_compute(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 1024)
    expected = engine.compute(prompt)
    assert engine.ask(prompt).stored_tokens == 1024
    answers = engine.ask_again(prompt)
    assert answers.token_ids == expected
    assert answers.loaded_tokens == 1023


def test_a_prompt_shorter_than_a_chunk_is_none_of_our_business(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 200)
    expected = engine.compute(prompt)
    first, again = engine.ask(prompt), engine.ask_again(prompt)
    assert first.token_ids == again.token_ids == expected
    assert (first.stored_tokens, again.loaded_tokens, again.cached_tokens) == (0, 0, 0)


def test_damaged_bytes_are_not_taken_from_a_peer(fleet: LlmFleet, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    stored_by(fleet, "engine-2", prompt, 768)
    poison(fleet.node_pid("engine-2"))
    engine = fleet.engines["engine-1"]
    answers = engine.ask(prompt)
    poison(fleet.node_pid("engine-2"))  # negative twice is as it was
    assert (answers.loaded_tokens, answers.peer_tokens) == (0, 0)
    assert answers.token_ids == engine.compute(prompt)


def test_an_abort_while_loading_frees_all_pages_and_spoils_nothing(fleet: LlmFleet, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    stored_by(fleet, "engine-2", prompt, 768)
    engine = fleet.engines["engine-1"]
    engine.forget()
    with stopped(fleet.node_pid("engine-2")):
        begun = engine.begin(prompt, 0.5)
        assert begun["token_ids"] == []
        assert begun["used"] > 0, "it waits for the peer with pages in hand"
        assert engine.abort(begun["request_id"]) == 0
    assert engine.ask(prompt).token_ids == engine.compute(prompt)
    prompt = make_prompt(seed + 1, 1000)
    stored_by(fleet, "engine-2", prompt, 768)
    wait_for_peer(engine, prompt)


def test_an_engine_finds_its_chunks_again_after_a_restart(fleet: LlmFleet, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    engine = fleet.engines["engine-1"]
    expected = engine.ask(prompt).token_ids
    node = fleet.node_pid("engine-1")
    engine.stop()
    fleet.start()
    answers = engine.ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 0)
    assert fleet.node_pid("engine-1") == node, "the node outlives its engine"


def test_an_engine_finds_its_chunks_again_after_it_was_killed_in_the_middle(fleet: LlmFleet, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    engine = fleet.engines["engine-1"]
    expected = engine.ask(prompt).token_ids
    engine.begin(make_prompt(seed + 1, 2000), 0.2)  # holds pages, credits and tickets
    node = fleet.node_pid("engine-1")
    engine.kill()
    fleet.start()
    answers = engine.ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 0)
    assert fleet.node_pid("engine-1") == node
    assert engine.compute(prompt) == expected


def stored_by(fleet: LlmFleet, name: str, prompt: list[int], token_count: int) -> None:
    """Has an engine compute and store a prompt, and waits until the fleet knows."""
    fleet.engines[name].ask(prompt)
    fleet.coordinator.wait_for_holder(prompt, name, token_count, REPORT_TIMEOUT_SECONDS)


def wait_for_peer(engine: LlmProcess, prompt: list[int]) -> None:
    """Asks again, with a shorter prompt each time, until the peer gives: one that failed is left alone for a while."""
    deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while not engine.ask(prompt, max_tokens=1).peer_tokens:
        assert time.monotonic() < deadline, "the peer is never asked again"
        engine.forget(external=True)
        time.sleep(0.1)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Freezes a process."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
