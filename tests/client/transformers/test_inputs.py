"""What a model is given besides token ids is in the way of the cache, unless it is known to change no KV."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation.utils import GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import TransformersKwargs

from lmkv_client.transformers.inputs import HARMLESS_INPUTS, HARMLESS_OPTIONS, ONE_SEQUENCE, POSITIONS
from tests.client.transformers.conftest import (
    CHUNK,
    NEW_TOKENS,
    MakeCache,
    compute,
    generate,
    make_prompt,
)

PROMPT = 100
HELD = PROMPT // CHUNK * CHUNK

CHANGES_KV = """
    attention_mask position_ids cache_position inputs_embeds token_type_ids mm_token_type_ids task_type_ids
    encoder_hidden_states encoder_attention_mask encoder_outputs mm_encoder_outputs pixel_values pixel_values_videos
    image_position_ids video_position_ids num_frames_per_video input_features input_features_mask per_layer_inputs
    cross_attention_states cross_attention_mask full_text_row_masked_out_mask image_patches interpolate_pos_encoding
    image_pixel_values image_sizes image_attention_mask audio_input_features audio_embed_sizes audio_attention_mask
    input_shape_ids input_pronunciation_ids langs lang_ids lengths cache mems perm_mask target_mapping input_mask
    use_mems num_hashes past_buckets_states state cache_params shared_kv_states cu_seq_lens_q cu_seq_lens_k
    max_length_q max_length_k is_causal seq_idx inputs
    """
"""Parameters of models that change KV, or are of models whose KV is refused: a call with one is not cached, unless it
is the usual value."""
NOT_CACHED = ("custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask")
"""Parameters of `generate` with which a call is not cached."""


def inputs_of_models() -> set[str]:
    """The parameters of `forward` of all decoders that transformers has."""
    found = set(TransformersKwargs.__annotations__)
    with warnings.catch_warnings(action="ignore"):  # of the modules of some models
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            kind = getattr(transformers, name if isinstance(name, str) else name[0])
            found |= set(inspect.signature(kind.forward).parameters)
    return found - {"self", "kwargs"}


def test_it_is_decided_of_every_input_and_option_whether_it_changes_kv() -> None:
    decided = HARMLESS_INPUTS | set(CHANGES_KV.split())
    assert not inputs_of_models() - decided, "new inputs of models: harmless (HARMLESS_INPUTS), or not (CHANGES_KV)"
    assert not HARMLESS_INPUTS & set(CHANGES_KV.split())
    assert set(POSITIONS) <= set(CHANGES_KV.split())
    options = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    options |= set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs", "inputs"}
    known = HARMLESS_OPTIONS | HARMLESS_INPUTS | set(ONE_SEQUENCE) | set(NOT_CACHED)
    assert not options - known, "new options of generate: HARMLESS_OPTIONS, ONE_SEQUENCE or NOT_CACHED"


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """A model that adds an embedding for each of `token_type_ids`, of its word embeddings."""
    torch.manual_seed(1)
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": 512}
    config = GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).eval()


def holes(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[0, 10:20] = 0
    return mask


def left_padding(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[0, :40] = 0
    return mask


INPUTS: dict[str, Callable[[Any, torch.Tensor], dict[str, Any]]] = {
    "token_type_ids": lambda _, prompt: {"token_type_ids": torch.full_like(prompt, 7)},
    "position_ids": lambda _, prompt: {"position_ids": torch.arange(prompt.shape[1]).unsqueeze(0) + 50},
    "holes": lambda _, prompt: {"attention_mask": holes(prompt)},
    "left_padding": lambda _, prompt: {"attention_mask": left_padding(prompt)},
    "inputs_embeds": lambda model, prompt: {"inputs_embeds": model.get_input_embeddings()((prompt + 5) % 500)},
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("declares", [True, False], ids=["declared", "not declared"])
def test_the_three_lines_never_mix_kv_of_other_inputs(
    gpt2: Any, make_cache: MakeCache, name: str, declares: bool
) -> None:
    """First with such an input, then without: what was computed with it is not stored."""
    model, cache, prompt = gpt2, make_cache(gpt2), make_prompt(1, PROMPT)
    inputs = INPUTS[name](model, prompt)
    plain, expected = compute(model, prompt), compute(model, prompt, **inputs)
    assert plain[-NEW_TOKENS:] != expected[-NEW_TOKENS:], "the input makes no difference"
    past = cache.load(prompt, **(inputs if declares else {}))
    output = compute(model, prompt, past_key_values=past, **inputs)
    assert output == expected
    assert cache.store(torch.tensor([[*prompt[0].tolist(), *output[-NEW_TOKENS:]]]), past) == 0
    assert cache.statistics.stored_tokens == 0
    past = cache.load(prompt)
    assert past.get_seq_length() == 0
    output = compute(model, prompt, past_key_values=past)
    assert output == plain
    assert cache.store(torch.tensor([output]), past) == PROMPT + NEW_TOKENS - 1


@pytest.mark.parametrize("name", INPUTS)
def test_the_three_lines_do_not_load_for_other_inputs(gpt2: Any, make_cache: MakeCache, name: str) -> None:
    """First without such an input, then with it."""
    model, cache, prompt = gpt2, make_cache(gpt2), make_prompt(1, PROMPT)
    inputs = INPUTS[name](model, prompt)
    generate(cache, prompt)
    assert cache.load(prompt, **inputs).get_seq_length() == 0
    expected = compute(model, prompt, **inputs)
    assert compute(model, prompt, past_key_values=cache.load(prompt, **inputs), **inputs) == expected
    past = cache.load(prompt)
    assert past.get_seq_length() == HELD
    with pytest.raises(ValueError, match="pass its other inputs to `load` too, which then loads nothing"):
        compute(model, prompt, past_key_values=past, **inputs)


@pytest.mark.parametrize("name", [name for name in INPUTS if name != "inputs_embeds"])
def test_one_call_with_other_inputs_is_computed_as_it_is(gpt2: Any, make_cache: MakeCache, name: str) -> None:
    model, cache, prompt = gpt2, make_cache(gpt2), make_prompt(1, PROMPT)
    inputs = INPUTS[name](model, prompt)
    plain, expected = compute(model, prompt), compute(model, prompt, **inputs)
    for _ in range(2):
        assert generate(cache, prompt, **inputs) == expected
        assert generate(cache, prompt) == plain
    assert cache.statistics.uncached_calls == 2
    assert cache.statistics.loaded_tokens == HELD


def test_usual_inputs_change_nothing(gpt2: Any, make_cache: MakeCache) -> None:
    cache, prompt = make_cache(gpt2), make_prompt(1, PROMPT)
    usual: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "position_ids": torch.arange(PROMPT).unsqueeze(0),
    }
    expected = compute(gpt2, prompt)
    assert generate(cache, prompt, **usual) == generate(cache, prompt, **usual) == expected
    past = cache.load(prompt, **usual)
    assert past.get_seq_length() == HELD
    assert compute(gpt2, prompt, past_key_values=past, **usual) == expected


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"output_scores": True}], ids=str)
def test_options_that_choose_tokens_use_the_cache(gpt2: Any, make_cache: MakeCache, options: dict[str, Any]) -> None:
    cache, prompt = make_cache(gpt2), make_prompt(1, PROMPT)
    expected = compute(gpt2, prompt, **options)
    assert generate(cache, prompt, **options) == generate(cache, prompt, **options) == expected
    assert (cache.statistics.uncached_calls, cache.statistics.loaded_tokens) == (0, HELD)


def test_calls_with_drafts_are_computed_as_they_are(gpt2: Any, make_cache: MakeCache) -> None:
    """transformers 5.19 passes wrong positions for them after a prefix that was loaded."""
    cache, prompt = make_cache(gpt2), make_prompt(1, PROMPT)
    prompt[0, 50:] = prompt[0, :50]  # what prompt lookup finds
    expected = compute(gpt2, prompt)
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": gpt2}):
        assert generate(cache, prompt, **options) == expected
    assert (cache.statistics.uncached_calls, cache.statistics.loaded_tokens) == (2, 0)


@contextmanager
def training(model: Any) -> Iterator[None]:
    model.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def with_adapters(model: Any) -> Iterator[None]:
    model._hf_peft_config_loaded = True
    try:
        yield
    finally:
        model._hf_peft_config_loaded = False


STATES: dict[str, Callable[[Any], Any]] = {
    "training": training,
    "adapters": with_adapters,
    "autocast": lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_the_model_that_change_kv_switch_the_cache_off(gpt2: Any, make_cache: MakeCache, name: str) -> None:
    cache, prompt = make_cache(gpt2), make_prompt(1, PROMPT)
    for number, state in enumerate((STATES[name], nullcontext, STATES[name]), 1):
        with state(gpt2):
            generate(cache, prompt)
            assert cache.load(prompt).get_seq_length() == (HELD if number == 2 else 0)
    assert cache.statistics.uncached_calls == 2
    assert cache.statistics.loaded_tokens == HELD


def test_only_tokens_that_were_computed_are_stored(
    gpt2: Any, make_cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller passes others to `store` than the model was given."""
    caplog.set_level(logging.INFO)
    cache, prompt = make_cache(gpt2), make_prompt(1, PROMPT)
    past = cache.load(prompt)
    output = compute(gpt2, prompt, past_key_values=past)
    other = [*output[:70], *make_prompt(3, len(output) - 70)[0].tolist()]
    assert cache.store(torch.tensor([other]), past) == 70
    assert f"{len(output) - 1 - 70} of {len(output) - 1} tokens are not stored" in caplog.text
    assert cache.load(torch.tensor([other])).get_seq_length() == 70
    assert generate(cache, torch.tensor([other])) == compute(gpt2, torch.tensor([other]))


def test_kv_that_is_computed_again_belongs_to_the_later_tokens(gpt2: Any, make_cache: MakeCache) -> None:
    """As after drafts that were refused: the cache is cut, and other tokens take the place of the first ones."""
    cache, prompt, other = make_cache(gpt2), make_prompt(1, PROMPT), make_prompt(2, PROMPT)
    mixed = torch.cat([prompt[:, :CHUNK], other[:, CHUNK:]], dim=1)
    past = cache.load(prompt)
    with torch.no_grad():
        gpt2(prompt, past_key_values=past)
        past.crop(CHUNK - PROMPT)
        gpt2(mixed[:, CHUNK:], past_key_values=past)
    assert cache.store(mixed, past) == PROMPT
    assert cache.load(prompt).get_seq_length() == CHUNK
    assert generate(cache, mixed) == compute(gpt2, mixed)


def test_kv_that_another_model_has_begun_is_not_stored(gpt2: Any, make_cache: MakeCache) -> None:
    """The tokens of this model's part are also the first of the prompt, so that only their number shows it."""
    cache, half = make_cache(gpt2), make_prompt(1, 2 * CHUNK)
    prompt = torch.cat([half, half], dim=1)
    other = GPT2LMHeadModel(gpt2.config).eval()
    past = cache.load(prompt)
    with torch.no_grad():
        other(half, past_key_values=past)
        gpt2(half, past_key_values=past)
    assert cache.store(prompt, past) == 0
    assert generate(cache, prompt) == compute(gpt2, prompt)
