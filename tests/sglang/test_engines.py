"""Real SGLang servers that keep their pages in lmkv: what they answer is what an engine without it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.model import TINY, make_model
from tests.sglang.checks import check_many_requests, check_salts, wait_loaded
from tests.sglang.conftest import Fleet
from tests.sglang.engine import SglangProcess
from tests.sglang.prompts import HIT_TOKENS, PAGE_COUNT, STORE_SECONDS, make_prompt
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[SglangProcess]:
    """An engine whose node, `one`, has a disk tier."""
    settings = {"LMKV_LOCAL_DISK": str(fleet.disk), "LMKV_MAX_LOCAL_DISK_SIZE": "1GiB"}
    with fleet.engine("one", settings=settings) as engine:
        yield engine


def test_a_prompt_is_loaded_after_a_flush(fleet: Fleet, engine: SglangProcess) -> None:
    prompt = make_prompt(1)
    cold = engine.answer(prompt)
    assert cold.cached_tokens == 0
    expected = cold.token_ids
    fleet.wait_stored(prompt, "one")
    engine.flush()
    before = fleet.found_chunks("one", "own")
    flushed = engine.answer(prompt)
    assert (flushed.token_ids, flushed.cached_tokens) == (expected, HIT_TOKENS)
    assert fleet.found_chunks("one", "own") - before >= PAGE_COUNT


def test_fifty_requests_at_once_are_answered_as_without_lmkv(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    check_many_requests(fleet, alone, engine, "one", seed=7)


def test_pages_with_a_salt_are_found_with_that_salt_alone(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    check_salts(fleet, alone, engine, "one", seed=10)


def test_a_killed_node_costs_a_recompute_and_the_next_one_serves(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    prompts = [make_prompt(seed) for seed in (3, 4)]
    expected = [alone.answer(prompt).token_ids for prompt in prompts]
    assert engine.answer(prompts[0]).token_ids == expected[0]
    fleet.wait_stored(prompts[0], "one")
    engine.flush()
    first_pids = fleet.node_pids("one")
    fleet.kill_node("one")
    assert engine.answer(prompts[0]).token_ids == expected[0]
    wait_until(lambda: set(fleet.node_pids("one")) - set(first_pids), "another node runs", STORE_SECONDS)
    assert engine.answer(prompts[1]).token_ids == expected[1]
    wait_loaded(engine, prompts[1], expected[1], HIT_TOKENS)


def test_pages_on_disk_are_loaded_and_damaged_ones_are_computed(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess
) -> None:
    prompts = [make_prompt(seed) for seed in (5, 6)]
    expected = [alone.answer(prompt).token_ids for prompt in prompts]
    for prompt, own in zip(prompts, expected, strict=True):
        assert engine.answer(prompt).token_ids == own
        fleet.wait_stored(prompt, "one")
    waiting = 'lmkv_node_tier_waiting_chunks{tier="disk"}'
    written = 'lmkv_node_tier_written_chunks_total{tier="disk"}'

    def are_on_disk() -> bool:
        metrics = fleet.metrics("one")
        return metrics.get(written, 0) >= 2 * PAGE_COUNT and not metrics.get(waiting)

    wait_until(are_on_disk, "all pages are on disk", STORE_SECONDS)
    engine.flush()
    fleet.kill_node("one")  # with all that was in its memory
    wait_loaded(engine, prompts[0], expected[0], HIT_TOKENS)
    assert fleet.found_chunks("one", "disk") >= PAGE_COUNT
    engine.flush()
    damage(fleet.disk)
    answer = engine.answer(prompts[1])
    assert answer.token_ids == expected[1]
    assert answer.cached_tokens < HIT_TOKENS
    damaged = 'lmkv_node_tier_damaged_chunks_total{tier="disk"}'
    wait_until(lambda: fleet.metrics("one").get(damaged, 0) >= 1, "the damage is noticed")


def test_pages_of_weights_that_were_replaced_are_not_used(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess, model: Path, tmp_path: Path
) -> None:
    """The last test of this engine: it does without lmkv from then on."""
    prompt = make_prompt(9)
    old = engine.answer(prompt).token_ids
    fleet.wait_stored(prompt, "one")
    other = make_model(tmp_path / "other", TINY, seed=1)
    alone.update_weights(other)
    try:
        expected = alone.answer(prompt).token_ids
    finally:
        alone.update_weights(model)
    assert expected != old
    engine.update_weights(other)
    for _ in range(2):
        answer = engine.answer(prompt)
        assert (answer.token_ids, answer.cached_tokens) == (expected, 0)
        engine.flush()


def damage(folder: Path) -> None:
    """Inverts one byte of every 256 of each file."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size >= 4096]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[128::256] = bytes(255 - byte for byte in content[128::256])
        with file.open("r+b") as open_file:
            open_file.write(content)
