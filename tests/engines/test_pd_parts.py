"""A prefill hands the items of its prompt off, but for the last token; of models with states those of its whole chunks.

In float32 an answer equals that of one engine. In bfloat16 it depends on where a prompt is split: there it equals that
of one engine which splits the prompt in the same place, by a hit in vLLM's own prefix cache.

`make test` runs Gemma 3, `make test-models` all architectures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.model import EOS_TOKEN_ID
from tests.engines.generated import generating
from tests.engines.pd import OUTPUT_TOKENS, Trio
from tests.support.models import ARCHITECTURES, make_architecture

PROMPT_TOKENS = 1100
"""Three steps of the prefill; the last chunk is not full."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "gemma3" else pytest.mark.more_models)
        for name in ARCHITECTURES
        if name != "llama"  # test_pd.py has a model with one kind of layers
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
            dtype=ARCHITECTURES[name].dtype,
        ) as trio,
    ):
        yield trio
        trio.check_nothing_is_left()
        trio.check_no_crash()


REPEATED: dict[str, object] = {"presence_penalty": 0.001}
"""Makes the proxy have the decode engine generate the whole answer."""


def has_states(name: str) -> bool:
    """Whether layers of a model have states, which are offered at the ends of chunks only."""
    return not {"conv", "linear_attention"}.isdisjoint(ARCHITECTURES[name].config.get("layer_types", ()))


def hit_tokens(name: str, token_count: int) -> int:
    """Tokens that a prefill hands off: one is left to compute; states are where chunks end."""
    architecture = ARCHITECTURES[name]
    return (
        (token_count - 1) // architecture.chunk_size * architecture.chunk_size if has_states(name) else token_count - 1
    )


def expected(trio: Trio, name: str, prompt: list[int]) -> tuple[int, ...]:
    """What one engine says, split in the same place if the place makes a difference."""
    if ARCHITECTURES[name].dtype == "float32":
        return trio.expected(prompt)
    return trio.expected_with_hit(prompt, hit_tokens(name, len(prompt)))


@pytest.mark.parametrize("token_count", [PROMPT_TOKENS, 1024, 1025])
def test_a_prompt_is_handed_off_and_its_last_token_is_computed(trio: Trio, name: str, token_count: int) -> None:
    prompt = trio.prompt(token_count)
    while (right := expected(trio, name, prompt))[0] == EOS_TOKEN_ID:  # has no text: the proxy would repeat the request
        prompt = trio.prompt(token_count)
    with generating(trio.prefill) as prefill, generating(trio.decode) as rest, trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, OUTPUT_TOKENS)
    assert answer.token_ids == right
    assert (prefill, rest) == ([1], [OUTPUT_TOKENS - 1]), "nothing is generated twice"
    assert decode["lmkv:loaded_tokens_total"] == hit_tokens(name, token_count)
    assert decode["lmkv:load_failures_total"] == 0


def test_a_prompt_without_a_whole_chunk_is_answered(trio: Trio, name: str) -> None:
    prompt = trio.prompt(100)
    right = expected(trio, name, prompt)
    with trio.counting(trio.decode) as decode:
        assert trio.proxy.complete(prompt, OUTPUT_TOKENS).token_ids == right
    assert decode["lmkv:loaded_tokens_total"] == hit_tokens(name, len(prompt))


def test_a_decode_that_repeats_the_first_token_loads_as_much(trio: Trio, name: str) -> None:
    prompt = trio.prompt(700)
    with generating(trio.decode) as whole, trio.counting(trio.decode) as decode:
        answer = trio.proxy.complete(prompt, OUTPUT_TOKENS, extra=REPEATED)
    assert whole == [OUTPUT_TOKENS]
    assert decode["lmkv:loaded_tokens_total"] == hit_tokens(name, len(prompt))
    assert decode["lmkv:load_failures_total"] == 0
    if ARCHITECTURES[name].dtype == "float32":
        assert answer.token_ids == trio.expected(prompt)


def test_prompts_at_the_same_time_are_answered_as_by_one_engine(trio: Trio, name: str) -> None:
    prompts = [trio.prompt(count) for count in (700, 900, 1300)]
    right = [expected(trio, name, prompt) for prompt in prompts]
    with trio.counting(trio.decode) as decode:
        answers = [answer.result().token_ids for answer in [trio.ask(prompt) for prompt in prompts]]
    assert decode["lmkv:loaded_tokens_total"] == sum(hit_tokens(name, len(prompt)) for prompt in prompts)
    architecture = ARCHITECTURES[name]
    if architecture.steps_exactly and architecture.dtype == "float32":  # else it depends on which requests share a step
        assert answers == right
