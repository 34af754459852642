"""A model whose layers attend in two ways, to all tokens and to the latest few: it is served whole, or not at all.

vLLM would keep such layers in several groups of KV cache. With a connector that moves one group it keeps them in one,
as if all layers attended to everything, and masks what is too old while it computes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.llm import Fleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

WINDOW = 256
REPORT_TIMEOUT_SECONDS = 20.0


@pytest.fixture(scope="module")
def hybrid_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 2 with random weights, scaled so that its tokens depend on the whole prompt."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    folder = tmp_path_factory.mktemp("hybrid")
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
        sliding_window=WINDOW,
        query_pre_attn_scalar=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0, (2.0 if "_proj" in name else 1.0) * weights.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two engines and a coordinator, ready."""
    with Fleet(nursery, hybrid_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("first")
        fleet.add("second")
        fleet.start()
        yield fleet


def test_what_lies_behind_the_window_is_loaded_too_and_the_answer_is_the_same(fleet: Fleet) -> None:
    first, second = fleet.engines["first"], fleet.engines["second"]
    prompt = make_prompt(1, 6 * WINDOW)
    expected = first.compute(prompt)
    assert first.compute(prompt[1:]) != expected, "what is far behind the window counts"
    answers = first.ask(prompt)
    assert (answers.token_ids, answers.cached_tokens, answers.stored_tokens) == (expected, 0, 6 * WINDOW)
    again = first.ask_again(prompt)
    assert (again.token_ids, again.peer_tokens) == (expected, 0)
    assert again.loaded_tokens == 6 * WINDOW
    fleet.coordinator.wait_for_holder(prompt, "first", 6 * WINDOW, REPORT_TIMEOUT_SECONDS)
    theirs = second.ask(prompt)
    assert (theirs.token_ids, theirs.peer_tokens) == (expected, 6 * WINDOW)
