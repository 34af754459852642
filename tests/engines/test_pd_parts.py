"""A prefill hands the items of its prompt's last whole chunks off; the decode engine computes what follows them.

`make test` runs Gemma 3, `make test-models` all architectures in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.model import EOS_TOKEN_ID
from tests.engines.pd import OUTPUT_TOKENS, Trio
from tests.support.models import ARCHITECTURES, make_architecture

PROMPT_TOKENS = 1100
"""Three steps of the prefill; the last chunk is not full."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "gemma3" else pytest.mark.more_models)
        for name, architecture in ARCHITECTURES.items()
        # In bfloat16 an answer depends on where a prompt is split; test_pd.py has a model with one kind of layers.
        if architecture.dtype == "float32" and name != "llama"
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    """The architecture."""
    return str(request.param)


@pytest.fixture(scope="module")
def trio(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One prefill, one decode, one proxy."""
    model = make_architecture(tmp_path_factory.mktemp("model"), name)
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Trio(
            Path(folder),
            model,
            tmp_path_factory.mktemp("logs"),
            seed=5,
            settings={"LMKV_CHUNK_SIZE": str(ARCHITECTURES[name].chunk_size)},
        ) as trio,
    ):
        yield trio
        trio.check_nothing_is_left()
        trio.check_no_crash()


@pytest.mark.parametrize("token_count", [PROMPT_TOKENS, 1024, 1025])
def test_the_last_whole_chunks_are_handed_off_and_the_rest_is_computed(trio: Trio, name: str, token_count: int) -> None:
    prompt = trio.prompt(token_count)
    while (expected := trio.expected(prompt))[0] == EOS_TOKEN_ID:  # has no text: the proxy would repeat the request
        prompt = trio.prompt(token_count)
    with trio.counting(trio.prefill) as prefill, trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, OUTPUT_TOKENS)
    assert answer.token_ids == expected
    assert prefill["vllm:generation_tokens_total"] == 1
    assert decode["vllm:generation_tokens_total"] == OUTPUT_TOKENS - 1, "nothing is generated twice"
    chunk_size = ARCHITECTURES[name].chunk_size
    assert decode["lmkv:loaded_tokens_total"] == (token_count - 1) // chunk_size * chunk_size
    assert decode["lmkv:load_failures_total"] == 0


def test_a_prompt_without_a_whole_chunk_is_answered(trio: Trio) -> None:
    prompt = trio.prompt(100)
    expected = trio.expected(prompt)
    assert trio.proxy.complete(prompt, OUTPUT_TOKENS).token_ids == expected


def test_prompts_at_the_same_time_are_answered_as_by_one_engine(trio: Trio) -> None:
    prompts = [trio.prompt(count) for count in (700, 900, 1300)]
    expected = [trio.expected(prompt) for prompt in prompts]
    assert [answer.result().token_ids for answer in [trio.ask(prompt) for prompt in prompts]] == expected
