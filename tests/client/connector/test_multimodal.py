"""Images in prompts, out of vLLM's real scheduler: their placeholders are equal, their KV is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.client.connector.simulated_engine import BLOCK, CHUNK, SimulatedEngine

MakeEngine = Callable[..., SimulatedEngine]

PLACEHOLDER = 2
BEGIN, LENGTH = CHUNK + 10, 30
PROMPT = [*range(3, 3 + BEGIN), *[PLACEHOLDER] * (LENGTH + 1), *range(3, 3 + 2 * CHUNK)]
"""Text, room for an image in the second chunk, text: three chunks and 41 tokens."""
WHOLE = 3 * CHUNK


def computed(engine: SimulatedEngine, request_id: str, *images: tuple[str, int, int]) -> int:
    """How many tokens of the prompt had to be computed, once vLLM has forgotten its own pages."""
    assert engine.scheduler.reset_prefix_cache()
    engine.add(request_id, PROMPT, images=images, output=1)
    engine.run(request_id)
    engine.check_answer(request_id)
    return engine.scheduled_tokens[request_id]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_prompt_with_the_same_image_is_loaded_and_one_with_another_up_to_it(
    make_engine: MakeEngine, asynchronous: bool
) -> None:
    engine = make_engine(enable_async_loading=asynchronous)
    assert computed(engine, "cat", ("cat", BEGIN, LENGTH)) == len(PROMPT)
    assert computed(engine, "cat again", ("cat", BEGIN, LENGTH)) == len(PROMPT) - WHOLE
    assert computed(engine, "dog", ("dog", BEGIN, LENGTH)) == len(PROMPT) - CHUNK
    assert computed(engine, "dog again", ("dog", BEGIN, LENGTH)) == len(PROMPT) - WHOLE
    engine.check_nothing_is_left()


def test_the_same_image_somewhere_else_is_another_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    computed(engine, "one", ("cat", BEGIN, LENGTH))
    assert computed(engine, "a token later", ("cat", BEGIN + 1, LENGTH)) == len(PROMPT) - CHUNK
    assert computed(engine, "no image") == len(PROMPT) - CHUNK


def test_an_image_that_is_prefilled_in_pieces_is_stored_and_loaded(make_engine: MakeEngine) -> None:
    engine = make_engine(step_tokens=2 * BLOCK)
    assert computed(engine, "cat", ("cat", BEGIN, LENGTH)) == len(PROMPT)
    assert computed(engine, "cat again", ("cat", BEGIN, LENGTH)) == len(PROMPT) - WHOLE
