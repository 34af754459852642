"""Prompts of transformers' models are stored in a real node and loaded from it; what is generated stays the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList

from lmkv.config import ConnectorConfig
from lmkv.config.resolve import to_environment
from lmkv_client.transformers import CacheStatistics
from tests.client.engine.engines import all_extents
from tests.client.engine.nodes import kill, node_pid
from tests.client.transformers.conftest import (
    CHUNK,
    MODELS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    GetModel,
    MakeCache,
    compute,
    generate,
    make_prompt,
)
from tests.waiting import wait_until

FULL_CHUNKS = PROMPT_TOKENS // CHUNK
HELD_TOKENS = FULL_CHUNKS * CHUNK
COMPUTED_TOKENS = PROMPT_TOKENS + NEW_TOKENS - 1
"""The last token of an answer has no KV."""


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_stored_and_loaded_again(get_model: GetModel, make_cache: MakeCache, name: str) -> None:
    model, cache, prompt = get_model(name), make_cache(get_model(name)), make_prompt(1)
    expected = compute(model, prompt)
    assert generate(cache, prompt) == expected
    assert (cache.statistics.loaded_tokens, cache.statistics.stored_tokens) == (0, COMPUTED_TOKENS)
    assert generate(cache, prompt) == expected
    assert (cache.statistics.loaded_tokens, cache.statistics.stored_tokens) == (HELD_TOKENS, COMPUTED_TOKENS)
    assert cache.engine.counters.hit_chunks == FULL_CHUNKS
    assert cache.statistics.looked_up_tokens == 2 * PROMPT_TOKENS
    other = make_prompt(2, prefix=prompt[0, :100].tolist())
    assert generate(cache, other) == compute(model, other)
    assert cache.statistics.loaded_tokens == HELD_TOKENS + 100 // CHUNK * CHUNK


def test_generate_reports_how_long_computing_takes(
    get_model: GetModel, make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get_model(next(iter(MODELS)))
    cache, prompt = make_cache(model), make_prompt(1)
    reported: list[tuple[int, float]] = []
    monkeypatch.setattr(cache.engine, "prefilled", lambda count, seconds: reported.append((count, seconds)))
    criteria = StoppingCriteriaList([lambda ids, _: torch.full((1,), ids.shape[1] == PROMPT_TOKENS + 2)])
    answer = generate(cache, prompt, stopping_criteria=criteria)
    assert len(answer) == PROMPT_TOKENS + 2, "the caller's criteria hold, too"
    generate(cache, prompt)
    assert [count for count, _ in reported] == [PROMPT_TOKENS, PROMPT_TOKENS - HELD_TOKENS]
    assert all(seconds > 0 for _, seconds in reported)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_was_computed_bit_for_bit(get_model: GetModel, make_cache: MakeCache, name: str) -> None:
    model, cache, prompt = get_model(name), make_cache(get_model(name)), make_prompt(1)
    computed = cache.load(prompt)
    assert computed.get_seq_length() == 0
    output = model.generate(prompt, past_key_values=computed, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert cache.store(output, computed) == computed.get_seq_length()
    loaded = cache.load(prompt)
    assert loaded.get_seq_length() == HELD_TOKENS
    for one, other in zip(computed.layers, loaded.layers, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one.keys[:, :, :HELD_TOKENS], other.keys)
        assert torch.equal(one.values[:, :, :HELD_TOKENS], other.values)
        assert other.keys.any()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_chat_continues_what_was_generated(get_model: GetModel, make_cache: MakeCache, name: str) -> None:
    model, cache = get_model(name), make_cache(get_model(name))
    first = generate(cache, make_prompt(1))
    prompt = make_prompt(2, 400, prefix=first)
    assert generate(cache, prompt) == compute(model, prompt)
    assert cache.statistics.loaded_tokens == COMPUTED_TOKENS, "to the last token of the answer that has KV"
    assert sum(cache.engine.counters.miss_tokens.values()) == PROMPT_TOKENS + 400 - COMPUTED_TOKENS
    third = make_prompt(3, 450, prefix=generate(cache, prompt))
    before = cache.statistics.loaded_tokens
    assert generate(cache, third) == compute(model, third)
    assert cache.statistics.loaded_tokens - before == 400 + NEW_TOKENS - 1


def test_a_chat_that_began_with_less_than_a_chunk_continues(get_model: GetModel, make_cache: MakeCache) -> None:
    model, cache = get_model("llama"), make_cache(get_model("llama"))
    first = generate(cache, make_prompt(1, 10), max_new_tokens=4, salt="tenant")
    prompt = make_prompt(2, 100, prefix=first)
    assert generate(cache, prompt, salt="tenant") == compute(model, prompt)
    assert cache.statistics.loaded_tokens == 13
    assert generate(cache, prompt) == compute(model, prompt)
    assert cache.statistics.loaded_tokens == 13, "another tenant finds nothing"


def test_one_token_is_left_to_compute(get_model: GetModel, make_cache: MakeCache) -> None:
    cache, prompt = make_cache(get_model("llama")), make_prompt(1, 4 * CHUNK)
    expected = generate(cache, prompt)
    past = cache.load(prompt)
    assert past.get_seq_length() == 4 * CHUNK - 1
    assert generate(cache, prompt) == expected


def test_the_end_of_a_prompt_is_found_where_it_is_stored(get_model: GetModel, make_cache: MakeCache) -> None:
    """One new token: then the last token of the prompt is the last one with KV."""
    cache, prompt = make_cache(get_model("llama")), make_prompt(1)
    generate(cache, prompt, max_new_tokens=1)
    assert cache.load(prompt).get_seq_length() == PROMPT_TOKENS - 1


def test_a_hit_below_the_minimum_is_computed(
    get_model: GetModel, make_cache: MakeCache, config: ConnectorConfig
) -> None:
    cache = make_cache(get_model("llama"), replace(config, min_retrieve_tokens=2 * CHUNK))
    prompt = make_prompt(1)
    generate(cache, prompt)
    assert cache.load(make_prompt(2, prefix=prompt[0, : CHUNK + 5].tolist())).get_seq_length() == 0
    assert cache.engine.counters.miss_tokens["below_minimum"] == CHUNK


def test_without_partial_chunks_only_full_ones_are_stored(
    get_model: GetModel, make_cache: MakeCache, config: ConnectorConfig
) -> None:
    cache = make_cache(get_model("llama"), replace(config, save_partial_chunks=False))
    generate(cache, make_prompt(1))
    assert cache.statistics.stored_tokens == COMPUTED_TOKENS // CHUNK * CHUNK


def test_without_save_decode_cache_only_the_prompt_is_stored(
    get_model: GetModel, make_cache: MakeCache, config: ConnectorConfig
) -> None:
    cache = make_cache(get_model("llama"), replace(config, save_decode_cache=False))
    generate(cache, make_prompt(1))
    assert cache.statistics.stored_tokens == PROMPT_TOKENS


def test_prompts_under_different_salts_are_different_prompts(get_model: GetModel, make_cache: MakeCache) -> None:
    cache, prompt = make_cache(get_model("llama")), make_prompt(1)
    expected = generate(cache, prompt, salt="one")
    assert generate(cache, prompt, salt="other") == expected
    assert cache.statistics.loaded_tokens == 0
    assert generate(cache, prompt, salt="one") == expected
    assert cache.statistics.loaded_tokens == HELD_TOKENS


SCRIPT = """
import sys, json, torch
from transformers import AutoModelForCausalLM
from lmkv_client.transformers import LmkvCache
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with LmkvCache(model) as cache:
    prompt = torch.tensor([json.loads(sys.argv[2])])
    output = cache.generate(prompt, max_new_tokens=int(sys.argv[3]), do_sample=False, pad_token_id=2, eos_token_id=None)
    print(json.dumps([output[0].tolist(), cache.statistics.loaded_tokens]))
"""


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_another_process_loads_what_was_stored(
    get_model: GetModel, model_folder: Callable[[str], Path], make_cache: MakeCache, config: ConnectorConfig, name: str
) -> None:
    prompt = make_prompt(1)
    expected = generate(make_cache(get_model(name)), prompt)
    command = [sys.executable, "-c", SCRIPT, str(model_folder(name)), json.dumps(prompt[0].tolist()), str(NEW_TOKENS)]
    environment = os.environ | to_environment(config) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [expected, HELD_TOKENS]


def test_a_lost_node_costs_a_computation_and_the_next_one_is_used(
    get_model: GetModel, make_cache: MakeCache, config: ConnectorConfig
) -> None:
    model, cache, prompt = get_model("llama"), make_cache(get_model("llama")), make_prompt(1)
    expected = generate(cache, prompt)
    kill(node_pid(config))
    past = cache.load(prompt)
    assert past.get_seq_length() == 0
    assert compute(model, prompt, past_key_values=past) == expected
    wait_until(lambda: cache.engine.counters.node_losses == 1 and cache.engine.is_attached, "a node is back")
    assert generate(cache, prompt) == expected, "stored again"
    loaded = cache.statistics.loaded_tokens
    assert generate(cache, prompt) == expected
    assert cache.statistics.loaded_tokens - loaded == HELD_TOKENS


def test_a_node_that_is_lost_after_the_load_does_not_disturb_what_was_loaded(
    get_model: GetModel, make_cache: MakeCache, config: ConnectorConfig
) -> None:
    model, cache, prompt = get_model("gemma2"), make_cache(get_model("gemma2")), make_prompt(1)
    expected = generate(cache, prompt)
    past = cache.load(prompt)
    assert past.get_seq_length() == HELD_TOKENS
    kill(node_pid(config))
    output = compute(model, prompt, past_key_values=past)
    assert output == expected
    assert cache.store(torch.tensor([output]), past) in range(COMPUTED_TOKENS + 1), "raises nothing"


def test_after_close_all_is_computed(get_model: GetModel, make_cache: MakeCache) -> None:
    cache, prompt = make_cache(get_model("llama")), make_prompt(1)
    expected = generate(cache, prompt)
    cache.close()
    assert generate(cache, prompt) == expected
    assert cache.statistics.loaded_tokens == 0


# ---- what is not cached


def test_calls_that_are_more_than_one_sequence_of_tokens_are_computed_as_they_are(
    get_model: GetModel, make_cache: MakeCache
) -> None:
    model, cache, prompt = get_model("llama"), make_cache(get_model("llama")), make_prompt(1, 100)
    generate(cache, prompt)
    two = torch.cat([prompt, make_prompt(2, 100)])
    padded = torch.ones_like(prompt)
    padded[0, :7] = 0
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (two, {}),
        (prompt, {"attention_mask": padded}),
        (prompt, {"num_beams": 2}),
        (prompt, {"past_key_values": DynamicCache(config=model.config)}),
        (prompt, {"use_cache": False}),
    ]
    for count, (input_ids, options) in enumerate(calls, 1):
        expected = compute(model, input_ids, **options)
        options = {"past_key_values": DynamicCache(config=model.config)} if "past_key_values" in options else options
        assert generate(cache, input_ids, **options) == expected
        assert cache.statistics.uncached_calls == count
    assert cache.statistics.loaded_tokens == 0
    assert generate(cache, prompt, attention_mask=torch.ones_like(prompt)) == compute(model, prompt)
    assert cache.statistics.loaded_tokens == 100 // CHUNK * CHUNK


def test_prompts_with_the_padding_token_are_computed_as_they_are(get_model: GetModel, make_cache: MakeCache) -> None:
    """Without a mask `generate` leaves such tokens out: the KV of the others is then not that of the prompt."""
    model, cache, prompt = get_model("qwen2"), make_cache(get_model("qwen2")), make_prompt(1)
    prompt[0, 7] = model.generation_config.pad_token_id
    expected = compute(model, prompt)
    for _ in range(2):
        assert generate(cache, prompt) == expected
    past = cache.load(prompt)
    assert compute(model, prompt, past_key_values=past) == expected
    assert cache.store(prompt, past) == 0
    assert cache.statistics == CacheStatistics(uncached_calls=2)
    assert compute(model, prompt, attention_mask=torch.ones_like(prompt)) != expected


def test_several_sequences_are_refused_by_load_and_store(get_model: GetModel, make_cache: MakeCache) -> None:
    cache = make_cache(get_model("llama"))
    for wrong in (torch.zeros((2, 5), dtype=torch.long), torch.zeros((1, 0), dtype=torch.long)):
        with pytest.raises(ValueError, match="pass one sequence"):
            cache.load(wrong)
    with pytest.raises(ValueError, match="pass one sequence"):
        cache.store(torch.zeros((2, 5), dtype=torch.long), cache.load(make_prompt(1, 5)))


def test_a_cache_that_cannot_be_copied_keeps_no_memory_of_the_pool(get_model: GetModel, make_cache: MakeCache) -> None:
    cache, prompt = make_cache(get_model("llama")), make_prompt(1)
    count = all_extents(cache.engine)
    past = cache.load(prompt)
    get_model("llama")(prompt, past_key_values=past)
    for layer in past.layers:
        layer.keys = layer.keys[:, :1].expand(-1, 7, -1, -1)  # of another model
    with pytest.raises(RuntimeError, match="size"):
        cache.store(prompt, past)
    assert all_extents(cache.engine) == count


def test_a_cache_without_the_tokens_outside_of_windows_is_not_stored(
    get_model: GetModel, make_cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache, prompt = get_model("gemma2"), make_cache(get_model("gemma2")), make_prompt(1)
    past = DynamicCache(config=model.config)
    output = compute(model, prompt, past_key_values=past)
    assert cache.store(torch.tensor([output]), past) == 0
    assert "pass generate that of `load`" in caplog.text
    assert cache.engine.counters.committed_chunks == 0
