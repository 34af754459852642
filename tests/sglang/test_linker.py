"""Real SGLang servers with the linker: what they answer is what an engine without lmkv answers, and none is aborted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmkv_client.demo.process import POLL_SECONDS
from tests.sglang.checks import check_hit, check_many_requests, check_salts, wait_loaded
from tests.sglang.conftest import Fleet
from tests.sglang.engine import SglangProcess
from tests.sglang.prompts import PAGE_COUNT, STORE_SECONDS, make_prompt
from tests.waiting import wait_until

FETCHED = 'lmkv_node_tier_read_chunks_total{tier="peers"}'


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[SglangProcess]:
    """An engine with the linker, and its node `linked`."""
    with fleet.engine("linked", links=True) as engine:
        yield engine


def test_a_prompt_is_loaded_after_a_flush_by_a_new_process_and_by_hicache(fleet: Fleet, alone: SglangProcess) -> None:
    """The linker's pages are those of the storage backend: each loads what the other has stored."""
    prompts = [make_prompt(seed) for seed in (31, 32)]
    expected = [alone.answer(prompt).token_ids for prompt in prompts]
    linked, stored = fleet.engine("first-link", instance_id="both", links=True), fleet.engine("both")
    with linked:
        cold = linked.answer(prompts[0])
        assert (cold.token_ids, cold.cached_tokens) == (expected[0], 0)
        fleet.wait_stored(prompts[0], "both")
        linked.flush()
        before = fleet.found_chunks("both", "own")
        check_hit(linked, prompts[0], expected[0])
        assert fleet.found_chunks("both", "own") - before >= PAGE_COUNT
    nodes = fleet.node_pids("both")
    assert len(nodes) == 1
    with stored:
        check_hit(stored, prompts[0], expected[0])
        assert stored.answer(prompts[1]).cached_tokens == 0
        fleet.wait_stored(prompts[1], "both")
    with fleet.engine("second-link", instance_id="both", links=True) as linked:  # a new process
        for prompt, own in zip(prompts, expected, strict=True):
            check_hit(linked, prompt, own)
    assert fleet.node_pids("both") == nodes
    assert len(fleet.coordinator.instances()["both"].specs) == 1


def test_decoded_pages_are_stored(fleet: Fleet, engine: SglangProcess) -> None:
    prompt = make_prompt(33, 70)
    turn = [*prompt, *engine.answer(prompt).token_ids]  # 82 tokens: the fifth page has decoded ones, all but the last
    fleet.wait_stored(turn[:80], "linked")
    engine.flush()
    assert engine.answer([*turn, *make_prompt(34, 20)]).cached_tokens == 80


def test_fifty_requests_at_once_are_answered_as_without_lmkv(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    check_many_requests(fleet, alone, engine, "linked", seed=35)


def test_pages_with_a_salt_are_found_with_that_salt_alone(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    check_salts(fleet, alone, engine, "linked", seed=38)


def test_pages_at_a_peer_are_fetched_for_a_later_request(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    prompt = make_prompt(36)
    expected = alone.answer(prompt).token_ids
    assert engine.answer(prompt).token_ids == expected
    fleet.wait_stored(prompt, "linked")
    with fleet.engine("linked-peer", links=True) as peer:
        first = peer.answer(prompt)
        assert (first.token_ids, first.cached_tokens) == (expected, 0)
        wait_until(lambda: fleet.metrics("linked-peer").get(FETCHED, 0) >= PAGE_COUNT, "fetched", STORE_SECONDS)
        peer.flush()
        check_hit(peer, prompt, expected)


def test_a_node_that_is_killed_during_requests_aborts_none(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    """Requests whose pages are being looked up, loaded and stored while the node dies, again and again."""
    shared = make_prompt(37, 400)
    prompts = [[*shared, *make_prompt(400 + index, 100)] for index in range(24)]
    with ThreadPoolExecutor(8) as threads:
        expected = [answer.token_ids for answer in threads.map(alone.answer, prompts)]
        is_done = threading.Event()

        def ask_all() -> list[tuple[int, ...]]:
            return [answer.token_ids for answer in threads.map(engine.answer, prompts)]

        def kill_often() -> int:
            killed: set[int] = set()
            while not is_done.wait(POLL_SECONDS):
                pids = set(fleet.node_pids("linked"))
                if pids - killed:
                    fleet.kill_node("linked")
                    killed |= pids
            return len(killed)

        assert ask_all() == expected
        with ThreadPoolExecutor(1) as killer:
            killing = killer.submit(kill_often)
            try:
                for _ in range(3):
                    engine.flush()
                    assert ask_all() == expected
            finally:
                is_done.set()
            assert killing.result() >= 1
    wait_loaded(engine, prompts[0], expected[0], 496)  # of 500, whole pages
