"""Models whose layers attend to the latest tokens only: some of the layers, or all of them.

Some: vLLM would keep such layers in several groups of KV cache. With a connector that moves one group it keeps them in
one, as if all layers attended to everything, and masks what is too old while it computes. All: vLLM frees the pages
behind the window while a request runs, so such a model is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmkv.errors import LmkvError
from tests.engines.llm import LlmFleet, Nursery, make_prompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

pytestmark = pytest.mark.engine

WINDOW = 256
REPORT_TIMEOUT_SECONDS = 20.0
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "sliding_window": WINDOW,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def hybrid_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 2 with random weights, scaled so that its tokens depend on the whole prompt."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SHAPE, query_pre_attn_scalar=64)
    return save(Gemma2ForCausalLM, config, tiny_model, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def sliding_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mistral as of its first version: all of its layers slide."""
    from transformers import MistralConfig, MistralForCausalLM

    return save(MistralForCausalLM, MistralConfig(**SHAPE), tiny_model, tmp_path_factory.mktemp("sliding"))


def save(kind: type[PreTrainedModel], config: PretrainedConfig, tokenizer: Path, folder: Path) -> Path:
    """Writes a model with random weights, and the tokenizer of another, to `folder`."""
    import torch

    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:
                weights.normal_(0, (2.0 if "_proj" in name else 1.0) * weights.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """Two engines and a coordinator, ready."""
    with LlmFleet(nursery, hybrid_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("first")
        fleet.add("second")
        fleet.start()
        yield fleet


def test_what_lies_behind_the_window_is_loaded_too_and_the_answer_is_the_same(fleet: LlmFleet) -> None:
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


def test_a_model_whose_layers_all_slide_does_not_start_and_says_why(
    nursery: Nursery, sliding_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with LlmFleet(nursery, sliding_model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("refused")
        with pytest.raises(
            LmkvError,
            match=r"model \S+ has a KV cache of kind SlidingWindowSpec, .* FullAttentionSpec and MLAAttentionSpec; "
            r"remove --kv-transfer-config, or add --disable-sliding-window, .* window of 256 tokens",
        ):
            fleet.start()
        del fleet.engines["refused"]
        advised = fleet.add("advised", {"chunk_size": "128"}, disable_sliding_window=True, max_model_len=WINDOW)
        fleet.start()
        prompt = make_prompt(1, WINDOW // 2 + 100)
        expected = advised.compute(prompt, max_tokens=8)
        assert advised.ask(prompt, max_tokens=8).token_ids == expected
        again = advised.ask_again(prompt, max_tokens=8)
        assert (again.token_ids, again.loaded_tokens) == (expected, 128)
