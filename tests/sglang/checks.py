"""What holds for every SGLang engine with lmkv, whichever way it loads: checks that its tests share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.sglang.conftest import Fleet
from tests.sglang.engine import SglangProcess
from tests.sglang.prompts import HIT_TOKENS, STORE_SECONDS, make_prompt
from tests.waiting import wait_until

REQUESTS = 50
SHARED_TOKENS = 400
"""First tokens of all prompts of `check_many_requests`: whole pages."""


def check_hit(
    engine: SglangProcess, prompt: Sequence[int], expected: Sequence[int], *, cache_salt: str | None = None
) -> None:
    """Asks once: all of the prompt but the last page is loaded."""
    answer = engine.answer(prompt, cache_salt=cache_salt)
    assert (answer.token_ids, answer.cached_tokens) == (tuple(expected), HIT_TOKENS)


def wait_loaded(engine: SglangProcess, prompt: Sequence[int], expected: Sequence[int], token_count: int) -> None:
    """Asks until this many tokens of the prompt are loaded, and each time for the expected answer."""

    def is_loaded() -> bool:
        engine.flush()  # else SGLang has it by itself
        answer = engine.answer(prompt)
        assert answer.token_ids == expected
        return answer.cached_tokens == token_count

    wait_until(is_loaded, "the node serves the prompt", STORE_SECONDS)


def check_salts(fleet: Fleet, alone: SglangProcess, engine: SglangProcess, instance_id: str, *, seed: int) -> None:
    """Pages of a prompt with a cache salt are found with that salt alone: by the engine, and by tokens."""
    prompt = make_prompt(seed)
    expected = alone.answer(prompt).token_ids
    cold = engine.answer(prompt, cache_salt="one")
    assert (cold.token_ids, cold.cached_tokens) == (expected, 0)
    fleet.wait_stored(prompt, instance_id, cache_salt="one")
    for other in ("two", ""):
        assert fleet.holders(prompt, other) == {}
        engine.flush()
        answer = engine.answer(prompt, cache_salt=other or None)
        assert (answer.token_ids, answer.cached_tokens) == (expected, 0)
    engine.flush()
    before = fleet.found_chunks(instance_id, "own")
    check_hit(engine, prompt, expected, cache_salt="one")
    assert fleet.found_chunks(instance_id, "own") > before


def check_many_requests(
    fleet: Fleet, alone: SglangProcess, engine: SglangProcess, instance_id: str, *, seed: int
) -> None:
    """Requests at once, before and after a flush: their answers are those without lmkv, and pages are loaded."""
    shared = make_prompt(seed, SHARED_TOKENS)
    prompts = [[*shared, *make_prompt(100 * seed + index, 60 + index)] for index in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as threads:
        expected = [answer.token_ids for answer in threads.map(alone.answer, prompts)]
        cold = list(threads.map(engine.answer, prompts))
        assert [answer.token_ids for answer in cold] == expected
        for prompt in prompts:
            fleet.wait_stored(prompt, instance_id)
        engine.flush()
        before = fleet.found_chunks(instance_id, "own")
        warm = list(threads.map(engine.answer, prompts))
    assert [answer.token_ids for answer in warm] == expected
    assert sum(answer.cached_tokens for answer in warm) >= REQUESTS * SHARED_TOKENS // 2
    assert fleet.found_chunks(instance_id, "own") > before
