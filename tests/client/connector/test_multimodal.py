"""Images in prompts: what they add to keys; and, in vLLM's real scheduler, that placeholders alone do not match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lmkv_client.connector.multimodal import multimodal_extras
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK

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


# ---- what they add to keys


@dataclass(frozen=True)
class Position:
    """Where an item lies in the prompt, as vLLM says it."""

    offset: int
    length: int


@dataclass(frozen=True)
class Feature:
    """An image or sound of a prompt, as vLLM says it."""

    identifier: str
    mm_position: Position


def image(identifier: str, offset: int, length: int) -> Feature:
    return Feature(identifier, Position(offset, length))


def test_a_prompt_without_images_has_no_extras() -> None:
    assert multimodal_extras([], 64) == {}


def test_an_image_enters_every_chunk_that_it_touches_and_no_other() -> None:
    assert set(multimodal_extras([image("a", 60, 70)], 64)) == {0, 1, 2}
    assert set(multimodal_extras([image("a", 64, 64)], 64)) == {1}


def test_other_images_other_places_and_other_orders_give_other_extras() -> None:
    prompts = [
        [image("a", 0, 4)],
        [image("b", 0, 4)],
        [image("a", 1, 4)],
        [image("a", 0, 4), image("b", 4, 4)],
        [image("b", 0, 4), image("a", 4, 4)],
        [image("ab", 0, 4)],
    ]
    extras = [multimodal_extras(prompt, 64)[0] for prompt in prompts]
    assert len(set(extras)) == len(prompts)


def test_the_same_image_at_the_same_place_in_a_later_chunk_has_the_same_extras() -> None:
    assert multimodal_extras([image("a", 3, 4)], 64)[0] == multimodal_extras([image("a", 67, 4)], 64)[1]


def test_an_image_from_the_previous_chunk_differs_from_one_that_begins_here() -> None:
    assert multimodal_extras([image("a", 60, 10)], 64)[1] != multimodal_extras([image("a", 64, 6)], 64)[1]
