"""Requests of every kind are answered as without a cache: many at once, preempted, sampled, with log probabilities.

Two engines with little room. `eager` loads asynchronously and prefills in pieces; `frugal` loads synchronously, has a
pool of a few chunks and stores no decoded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt

pytestmark = pytest.mark.engine

KV_CACHE_BYTES = 12 << 20
"""3072 tokens."""


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """Both engines, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs")) as fleet:
        room: dict[str, Any] = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "max_model_len": 2048}
        fleet.add("eager", block_size=32, max_num_batched_tokens=300, **room)
        fleet.add(
            "frugal",
            {"enable_async_loading": "false", "max_local_cpu_size": "12MiB", "save_decode_cache": "false"},
            block_size=64,
            **room,
        )
        fleet.start()
        yield fleet


@pytest.fixture(params=["eager", "frugal"])
def engine(fleet: LlmFleet, request: pytest.FixtureRequest) -> LlmProcess:
    """Each of the two."""
    return fleet.engines[request.param]


def test_preempted_requests_resume_where_they_were(engine: LlmProcess, seed: int) -> None:
    prompts = [make_prompt(seed + number, 700) for number in range(4)]
    expected = engine.compute(*prompts, max_tokens=120)
    first = engine.ask(*prompts, max_tokens=120)
    assert first.token_ids == expected
    assert first.grown["vllm:num_preemptions_total"] > 0, "there was room for all: the test tests nothing"
    again = engine.ask_again(*prompts, max_tokens=120)
    assert again.token_ids == expected
    assert again.grown["vllm:num_preemptions_total"] > 0
    assert again.loaded_tokens > 0


def test_many_requests_at_once_share_their_prefixes(engine: LlmProcess, seed: int) -> None:
    families = [make_prompt(seed + number, 600) for number in range(3)]
    prompts = [make_prompt(seed + 100 + number, 700, prefix=families[number % 3]) for number in range(12)]
    expected = engine.compute(*prompts)
    assert engine.ask(*prompts).token_ids == expected
    again = engine.ask_again(*prompts)
    assert again.token_ids == expected
    backwards = engine.ask_again(*reversed(prompts))
    assert backwards.token_ids == expected[::-1]
    # Of what is asked in the same order again and again, a pool that is too small for all may hold nothing any more.
    assert again.loaded_tokens + backwards.loaded_tokens >= 512


def test_the_next_turn_of_a_conversation_hits_decoded_tokens(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 400)
    first = engine.ask(prompt, max_tokens=400)
    follow_up = make_prompt(seed + 1, 900, prefix=[*prompt, *first.token_ids[0]])
    decoded_too = engine.name == "eager"
    assert first.stored_tokens == (768 if decoded_too else 256)
    second = engine.ask_again(follow_up)
    assert second.loaded_tokens == (768 if decoded_too else 256)
    assert second.token_ids == engine.compute(follow_up)


def test_several_samples_of_one_prompt_all_use_what_was_loaded(engine: LlmProcess, seed: int) -> None:
    """Sampled from the one best token: vLLM cannot take seeds for prompts that it prefills in pieces on a CPU."""
    prompt = make_prompt(seed, 600)
    (expected,) = engine.compute(prompt)
    sampling: dict[str, Any] = {"n": 3, "temperature": 1.0, "top_k": 1}
    assert engine.ask(prompt, **sampling).answers[0].samples == (expected,) * 3
    again = engine.ask_again(prompt, **sampling)
    assert again.answers[0].samples == (expected,) * 3
    assert again.loaded_tokens >= 512


def test_log_probabilities_of_a_prompt_are_computed_though_it_is_stored(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 600)
    first = engine.ask(prompt, prompt_logprobs=0)
    assert (first.cached_tokens, first.stored_tokens) == (0, 512)
    again = engine.ask_again(prompt, prompt_logprobs=0)
    assert (again.cached_tokens, again.loaded_tokens) == (0, 0)
    assert len(again.answers[0].prompt_logprobs) == 600
    assert again.answers[0].prompt_logprobs[1:] == pytest.approx(first.answers[0].prompt_logprobs[1:], abs=1e-4)
    assert again.token_ids == first.token_ids
    after = engine.ask_again(prompt)
    assert (after.token_ids, after.loaded_tokens) == (first.token_ids, 512)


def test_an_aborted_request_leaves_no_page_in_use(engine: LlmProcess, seed: int) -> None:
    prompt = make_prompt(seed, 1000)
    begun = engine.begin(prompt, 0.3)
    assert begun["used"] > 0
    assert engine.abort(begun["request_id"]) == 0
    expected = engine.compute(prompt)
    assert engine.ask_again(prompt).token_ids == expected
    assert engine.ask_again(prompt).token_ids == expected
