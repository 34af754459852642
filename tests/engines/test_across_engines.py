"""KV goes between vLLM and transformers if both set `share_across_engines`, in float32 with the same tokens.

Each model has a vLLM engine; transformers runs in the process of the tests, attached to the same node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers warns about when it is imported is not ours to mend
    from transformers import AutoModelForCausalLM

    from lmkv_client.transformers import LmkvCache

from lmkv.config import ConnectorConfig, load
from lmkv_client.model_identity import SHARED_ROTARY_FORMS
from tests.engines.llm import CALM, LlmFleet, LlmProcess, Nursery
from tests.engines.llm import make_prompt as make_any_prompt
from tests.support.models import make_architecture, make_plain

pytestmark = pytest.mark.engine

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 32}),
    "qwen3": ("qwen3", {}),
}
"""Type and changes of the configuration: every type that is shared, every kind of rotary scaling."""
SETTINGS = {"share_across_engines": "true", "chunk_size": "100", "save_partial_chunks": "true"}
PROMPT_TOKENS, HELD_TOKENS, NEW_TOKENS = 1010, 1000, 16
ANSWERED = PROMPT_TOKENS + NEW_TOKENS - 1
"""Tokens with KV after an answer."""
PAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The two engines of one model."""

    vllm: LlmProcess
    model: Any
    cache: LmkvCache
    own_cache: LmkvCache
    """Of transformers without the key, at the same node."""

    def compute(self, prompt: list[int]) -> list[int]:
        """What transformers generates by itself."""
        ids = torch.tensor([prompt])
        return self._new(self.model.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS), prompt)

    def generate(self, prompt: list[int], cache: LmkvCache | None = None) -> list[int]:
        """What transformers generates with lmkv."""
        ids = torch.tensor([prompt])
        output = (cache or self.cache).generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
        return self._new(output, prompt)

    @staticmethod
    def _new(output: torch.Tensor, prompt: list[int]) -> list[int]:
        tokens: list[int] = output[0].tolist()
        return tokens[len(prompt) :]


OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "pad_token_id": PAD,
    "eos_token_id": None,
}


def make_prompt(seed: int, token_count: int, *, prefix: Sequence[int] = ()) -> list[int]:
    """Without the padding token, which transformers leaves out."""
    own = [max(token, PAD + 1) for token in make_any_prompt(seed, token_count - len(prefix))]
    return [*prefix, *own]


def test_every_type_of_model_that_is_shared_is_tested() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == SHARED_ROTARY_FORMS.keys()


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both engines of a model, at one node."""
    model_type, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("models") / request.param
    make_plain(folder, model_type, **changes) if changes or model_type != "llama" else make_architecture(
        folder, "llama"
    )
    with LlmFleet(nursery, folder, tmp_path_factory.mktemp("logs")) as fleet:
        vllm = fleet.add("both", SETTINGS)
        fleet.start()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        own = {"instance_id": "both", "runtime_dir": str(fleet.runtime_dir)}
        config = load(ConnectorConfig, flags=CALM | SETTINGS | own, env={})
        alone = load(ConnectorConfig, flags=CALM | SETTINGS | own | {"share_across_engines": "false"}, env={})
        with LmkvCache(model, config=config) as cache, LmkvCache(model, config=alone) as own_cache:
            yield Pair(vllm=vllm, model=model, cache=cache, own_cache=own_cache)


def test_transformers_continues_what_vllm_has_computed(pair: Pair) -> None:
    prompt = make_prompt(1, PROMPT_TOKENS)
    answer = list(pair.vllm.ask(prompt, max_tokens=NEW_TOKENS).token_ids[0])
    before = pair.cache.statistics.loaded_tokens
    assert pair.generate(prompt) == pair.compute(prompt) == answer
    assert pair.cache.statistics.loaded_tokens - before >= HELD_TOKENS


def test_vllm_continues_what_transformers_has_computed(pair: Pair) -> None:
    prompt = make_prompt(2, PROMPT_TOKENS)
    answer = pair.generate(prompt)
    longer = make_prompt(3, PROMPT_TOKENS + 300, prefix=[*prompt, *answer])
    continued = pair.vllm.ask(longer, max_tokens=NEW_TOKENS)
    assert continued.loaded_tokens == ANSWERED, "to the last token of the answer that has KV"
    assert list(continued.token_ids[0]) == pair.compute(longer)
    again = pair.vllm.ask_again(prompt, max_tokens=NEW_TOKENS)
    assert again.loaded_tokens == PROMPT_TOKENS - 1, "the longer chunk of the answer serves the prompt"
    assert list(again.token_ids[0]) == answer == pair.compute(prompt)


def test_without_the_key_nothing_is_shared(pair: Pair) -> None:
    prompt = make_prompt(4, PROMPT_TOKENS)
    pair.vllm.ask(prompt)
    expected = pair.compute(prompt)
    assert pair.generate(prompt, pair.own_cache) == expected
    assert pair.own_cache.statistics.loaded_tokens == 0
    assert pair.generate(prompt, pair.own_cache) == expected
    assert pair.own_cache.statistics.loaded_tokens == HELD_TOKENS
