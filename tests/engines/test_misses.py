"""Why prompts of real engines miss, by the counter at their `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt

CHUNK = 256
REST = 88
FULL = 2 * CHUNK
PROMPT = make_prompt(1, FULL + REST)
WAIT_SECONDS = 60.0
MINIMUM = 3 * CHUNK


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """`small`, whose pool has room for 8 chunks, and `large`, which loads nothing below a minimum."""
    logs = tmp_path_factory.mktemp("logs")
    with LlmFleet(nursery, tiny_model, logs, coordinator=True) as fleet:
        fleet.add("small", {"max_local_cpu_size": "8MiB"})
        fleet.add("large", {"min_retrieve_tokens": str(MINIMUM)})
        fleet.start()
        yield fleet


@pytest.fixture
def small(fleet: LlmFleet) -> LlmProcess:
    """The engine whose pool is small."""
    return fleet.engines["small"]


@pytest.fixture
def large(fleet: LlmFleet) -> LlmProcess:
    """The engine with a minimum."""
    return fleet.engines["large"]


def test_a_prompt_is_new_once_and_then_only_its_end_is_computed(small: LlmProcess) -> None:
    assert small.ask(PROMPT).missed_tokens == {"never_stored": FULL, "uncacheable": REST}
    again = small.ask_again(PROMPT)
    assert (again.loaded_tokens, again.missed_tokens) == (FULL, {"uncacheable": REST})


def test_under_another_salt_it_is_of_another_salt(small: LlmProcess) -> None:
    assert small.ask_again(PROMPT, salt="another").missed_tokens == {"other_salt": FULL, "uncacheable": REST}


def test_what_did_not_fit_into_the_pool_was_evicted_by_stores(small: LlmProcess) -> None:
    prompts = [make_prompt(100 + number, 2 * FULL) for number in range(6)]
    first = [small.ask(prompt) for prompt in prompts]
    assert all(answers.missed_tokens == {"never_stored": 2 * FULL} for answers in first)
    missed = [small.ask_again(prompt).missed_tokens for prompt in prompts]
    assert sum(one.get("evicted_by_store", 0) for one in missed) >= FULL
    assert not any("never_stored" in one for one in missed)


def test_a_hit_below_the_minimum_is_computed(fleet: LlmFleet, small: LlmProcess, large: LlmProcess) -> None:
    prompt = make_prompt(2, FULL + REST)
    small.ask(prompt)
    fleet.coordinator.wait_for_holder(prompt, "small", FULL, WAIT_SECONDS)
    assert large.ask(prompt).missed_tokens == {"below_minimum": FULL, "uncacheable": REST}


def test_after_a_reset_the_same_weights_have_another_name(large: LlmProcess) -> None:
    prompt = make_prompt(3, FULL + REST)
    large.ask(prompt)
    large.forget(external=True)
    assert large.ask(prompt).missed_tokens == {"other_namespace": FULL, "uncacheable": REST}
