"""The engine that all tests in this folder use, here without lmkv in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv.errors import LmkvError, Unreachable
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import session_pids
from tests.waiting import wait_until

pytestmark = pytest.mark.in_order

PROMPT = [2 + (7 * i * i + i) % 500 for i in range(1000)]


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine without lmkv, for the tests below in their order: the last ones end it."""
    with EngineProcess(tiny_model, tmp_path_factory.mktemp("logs"), transfer_config=None) as engine:
        yield engine


def test_a_completion_is_the_same_cold_from_the_prefix_cache_and_after_its_reset(engine: EngineProcess) -> None:
    cold = engine.complete(PROMPT)
    hit = engine.complete(PROMPT)
    engine.reset_prefix_cache()
    again = engine.complete(PROMPT)
    assert cold.token_ids == hit.token_ids == again.token_ids
    assert (cold.cached_tokens, hit.cached_tokens, again.cached_tokens) == (0, 896, 0)
    assert len(cold.token_ids) == 16
    assert len(set(cold.token_ids)) > 4, "a model that repeats itself would hide wrong KV cache"
    assert cold.prompt_tokens == 1000
    assert cold.finish_reason == "length"
    assert 0 < cold.ttft_seconds < cold.total_seconds


def test_the_completion_depends_on_every_part_of_the_prompt(engine: EngineProcess) -> None:
    completions = {engine.complete(PROMPT).token_ids}
    for begin in range(0, len(PROMPT), 125):
        changed = [*PROMPT[:begin], *PROMPT[begin : begin + 125][::-1], *PROMPT[begin + 125 :]]
        completions.add(engine.complete(changed).token_ids)
    assert len(completions) == 9


def test_a_streamed_completion_is_the_one_that_comes_whole(engine: EngineProcess) -> None:
    whole = engine.complete(PROMPT, 8, stream=False)
    streamed = engine.complete(PROMPT, 8)
    assert whole.token_ids == streamed.token_ids
    assert whole.text == streamed.text
    pieces = list(engine.stream(PROMPT, 8))  # of a token each, or more where the machine is busy
    assert [token_id for piece in pieces for token_id in piece.token_ids] == list(whole.token_ids)
    assert all(piece.token_ids for piece in pieces)


def test_log_probabilities_come_with_the_tokens_if_asked_for(engine: EngineProcess) -> None:
    completion = engine.complete(PROMPT, 4, logprobs=True, extra={"seed": 1})
    assert len(completion.logprobs) == 4
    assert all(-20 < value <= 0 for value in completion.logprobs)
    assert engine.complete(PROMPT, 4).logprobs == ()


def test_a_text_is_a_prompt_too_and_a_salt_keeps_prompts_apart(engine: EngineProcess) -> None:
    text = "Explain the significance of KV cache in language models." * 5
    assert engine.complete(text, 2).prompt_tokens == len(text)
    assert engine.complete(text, 2).cached_tokens == 256
    assert engine.complete(text, 2, extra={"cache_salt": "mine"}).cached_tokens == 0


def test_a_closed_stream_is_an_aborted_request(engine: EngineProcess) -> None:
    tokens = engine.stream(PROMPT, 5000)
    next(tokens)
    assert engine.metrics()["vllm:num_requests_running"] == 1
    tokens.close()
    wait_until(lambda: engine.metrics()["vllm:num_requests_running"] == 0)


def test_metrics_are_summed_over_the_samples_that_carry_the_labels(engine: EngineProcess) -> None:
    tokens = "vllm:prompt_tokens_total"
    assert engine.metrics(model_name="tiny")[tokens] == engine.metrics()[tokens] > 0
    assert engine.metrics(model_name="another") == {}


def test_a_refused_request_has_the_engines_message(engine: EngineProcess) -> None:
    with pytest.raises(LmkvError, match="out of vocabulary"):
        engine.complete([512])
    with pytest.raises(LmkvError, match="HTTP 400"):
        engine.complete(PROMPT, 9000)


def test_a_killed_engine_leaves_no_process_and_breaks_off_what_it_answers(engine: EngineProcess) -> None:
    tokens = engine.stream(PROMPT, 5000)
    next(tokens)
    pid = engine.pid
    assert len(session_pids(pid)) > 1
    engine.kill()
    assert session_pids(pid) == []
    assert not engine.alive
    with pytest.raises(Unreachable):
        list(tokens)
    with pytest.raises(Unreachable):
        engine.complete(PROMPT)
