"""KV caches in 8 bits: a hit of a model with several parts gives the answer of an engine without a connector.

Both engines have the same `kv_cache_dtype`; vLLM's CPU backend needs AVX-512 or AMX for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.llm import LlmFleet, Nursery, make_prompt
from tests.engines.parts import NodeParts
from tests.support.models import ARCHITECTURES, make_architecture

pytestmark = pytest.mark.engine

ARCHITECTURE = "gemma3"
PROMPT_TOKENS = 1000
HIT_TOKENS = 768


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows beside full attention."""
    return make_architecture(tmp_path_factory.mktemp("models") / ARCHITECTURE, ARCHITECTURE)


@pytest.fixture(scope="module", params=["fp8_e4m3", "fp8_e5m2"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    """vLLM's name of the type."""
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery, model: Path, tmp_path_factory: pytest.TempPathFactory, kv_cache_dtype: str
) -> Iterator[LlmFleet]:
    """Both engines and a coordinator, ready."""
    if not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.")
    chunk_size = str(ARCHITECTURES[ARCHITECTURE].chunk_size)
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("bare", transfer_config=None, kv_cache_dtype=kv_cache_dtype)
        fleet.add("lmkv", {"chunk_size": chunk_size}, kv_cache_dtype=kv_cache_dtype)
        fleet.start()
        yield fleet


def test_a_prompt_is_stored_and_loaded_again(fleet: LlmFleet, kv_cache_dtype: str) -> None:
    bare, lmkv = (fleet.engines[name] for name in ("bare", "lmkv"))
    parts = NodeParts(fleet, "lmkv")
    assert parts.spec.kv_dtype == kv_cache_dtype
    prompt = make_prompt(1, PROMPT_TOKENS)
    expected = bare.ask(prompt)
    first = lmkv.ask(prompt)
    assert (first.token_ids, first.cached_tokens) == (expected.token_ids, 0)
    again = lmkv.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.cached_tokens) == (expected.token_ids, HIT_TOKENS, HIT_TOKENS)
    lmkv.forget()
    with parts.poisoned(prompt, 0):
        assert lmkv.ask(prompt).token_ids != expected.token_ids, "what is loaded is computed with"
