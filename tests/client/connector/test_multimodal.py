"""Images in prompts: what they add to keys; and, in vLLM's real scheduler, that placeholders alone do not match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.request import RequestStatus

from lmkv_client.connector.multimodal import TENSORS, MediaDigests, UnknownMedia
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK
from tests.client.connector.simulated_worker import content_of

MakeEngine = Callable[..., SimulatedEngine]

PLACEHOLDER = 2
BEGIN, LENGTH = CHUNK + 10, 30
PROMPT = [*range(3, 3 + BEGIN), *[PLACEHOLDER] * (LENGTH + 1), *range(3, 3 + 2 * CHUNK)]
"""Text, room for an image in the second chunk, text: three chunks and 41 tokens."""
WHOLE = 3 * CHUNK


def computed(engine: SimulatedEngine, request_id: str, *images: tuple[str, int, int], **more: Any) -> int:
    """How many tokens of the prompt had to be computed, once vLLM has forgotten its own pages."""
    assert engine.scheduler.reset_prefix_cache()
    engine.add(request_id, PROMPT, images=images, output=1, **more)
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


def image(content: str, offset: int, length: int, identifier: str = "") -> MultiModalFeatureSpec:
    name = identifier or uuid4().hex
    return MultiModalFeatureSpec(content_of(content), "image", name, PlaceholderRange(offset, length))


def multimodal_extras(features: Sequence[MultiModalFeatureSpec], chunk_size: int) -> dict[int, bytes]:
    return MediaDigests().extras(features, chunk_size)


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


def item(**values: Any) -> MultiModalFeatureSpec:
    """An item of which the processor has made these values."""
    elements = {name: MultiModalFieldElem(value, MultiModalSharedField(batch_size=1)) for name, value in values.items()}
    return MultiModalFeatureSpec(MultiModalKwargsItem(elements), "image", uuid4().hex, PlaceholderRange(0, 4))


def test_what_an_item_is_called_does_not_matter() -> None:
    """Names are chosen by callers, or count the items of one process."""
    names = ("renderer0-mm-1-image-0", "renderer0-mm-2-image-0", "a" * 64)
    assert len({multimodal_extras([image("a", 0, 4, name)], 64)[0] for name in names}) == 1
    assert len({multimodal_extras([image(content, 0, 4)], 64)[0] for content in "abc"}) == 3


def test_everything_that_the_processor_passes_on_counts() -> None:
    pixels, grid = torch.zeros(3, 4), torch.tensor([1, 2])
    flipped = pixels.clone()
    flipped[2, 3] = 1
    items = [
        item(pixels=pixels, grid=grid),
        item(pixels=flipped, grid=grid),
        item(pixels=pixels.reshape(4, 3), grid=grid),
        item(pixels=pixels.to(torch.bfloat16), grid=grid),
        item(pixels=pixels, grid=grid + 1),
        item(pixels=pixels, size=grid),
        item(pixels=[pixels, grid]),
        item(pixels=[pixels], grid=grid),
        item(pixels=pixels, grid=grid, crops=2),
        item(pixels=pixels, grid=grid, crops=3),
    ]
    digests = MediaDigests()
    assert len({digests.extras([one], 64)[0] for one in items}) == len(items), "also where they share tensors"


def test_values_that_are_no_tensors_count_in_full_or_the_item_has_no_key() -> None:
    long = np.zeros(5000)
    other = long.copy()
    other[2500] = 1  # which the array's `repr` omits
    pixels = torch.zeros(3)
    extras = {
        multimodal_extras([item(pixels=pixels, extra=one)], 64)[0] for one in (long, other, long.reshape(50, 100))
    }
    assert len(extras) == 3
    for value in (object(), np.array([object()]), {1, 2}):
        with pytest.raises(UnknownMedia, match="whose content lmkv cannot read"):
            multimodal_extras([item(pixels=pixels, extra=value)], 64)


def test_which_placeholders_are_of_the_item_counts() -> None:
    one, other = (item(pixels=torch.zeros(3)) for _ in range(2))
    other.mm_position = PlaceholderRange(0, 4, is_embed=torch.tensor([True, False, True, True]))
    assert multimodal_extras([one], 64) != multimodal_extras([other], 64)


def test_an_item_whose_name_another_item_had_has_no_key_nor_has_that_one_afterwards() -> None:
    digests = MediaDigests()
    one, other = (image(content, 0, 4, identifier="chosen") for content in ("a", "b"))
    assert digests.extras([one], 64) == digests.extras([one], 64)
    for confused in (other, one):
        with pytest.raises(UnknownMedia, match="several items are named 'chosen'"):
            digests.extras([confused], 64)
    assert digests.extras([image("b", 0, 4, identifier="another")], 64)


def test_all_items_of_a_request_are_noted_also_if_it_has_no_key() -> None:
    digests = MediaDigests()
    elsewhere = MultiModalFeatureSpec(None, "image", "unknown", PlaceholderRange(0, 4))
    with pytest.raises(UnknownMedia):
        digests.extras([elsewhere, image("a", 4, 4, identifier="known")], 64)
    for other in (image("b", 0, 4, identifier="known"), image("b", 0, 4, identifier="unknown")):
        with pytest.raises(UnknownMedia, match="several items"):
            digests.extras([other], 64)


def test_requests_with_a_name_that_becomes_ambiguous_or_is_forgotten_are_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmkv_client.connector.multimodal.MAX_NAMES", 2)
    digests = MediaDigests()
    for name in ("first", "second", "first"):
        digests.extras([image("a", 0, 4, identifier=name)], 64)
    assert digests.take_ambiguous() == set()
    digests.extras([image("a", 0, 4, identifier="third")], 64)
    with pytest.raises(UnknownMedia):
        digests.extras([image("b", 0, 4, identifier="first")], 64)
    assert (digests.take_ambiguous(), digests.take_ambiguous()) == ({"first", "second"}, set())
    assert list(digests._named) == ["third", "first"]


def named(engine: SimulatedEngine, request_id: str, content: str, name: str, **more: Any) -> int:
    """As `computed`, with a name that the caller has chosen."""
    engine.settle()
    return computed(engine, request_id, (content, BEGIN, LENGTH), names=[name], **more)


@pytest.mark.parametrize("late", [False, True])
def test_an_item_of_a_session_gives_its_name_a_content(make_engine: MakeEngine, late: bool) -> None:
    """Sessions are not cached; those that continue get further items."""
    engine = make_engine()
    prompt = PROMPT[BEGIN - 10 :]
    dog: dict[str, Any] = {"images": [("dog", 10, LENGTH)], "names": ["chosen"]}
    session = engine.add("session", prompt, output=1, resumable=True, **({} if late else dog))
    compute_prompt(engine)
    if late:
        engine.add("session", prompt, output=1, resumable=True, **dog)
        engine.requests["session"] = session  # which has what was added
        compute_prompt(engine)
    engine.add("cat", PROMPT, images=[("cat", BEGIN, LENGTH)], names=["chosen"], output=1)
    engine.run("cat")
    engine.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    engine.settle()
    assert computed(engine, "cat by another name", ("cat", BEGIN, LENGTH)) == len(PROMPT)


def compute_prompt(engine: SimulatedEngine) -> None:
    """Steps until a session waits for its next prompt."""
    for _ in range(4):
        engine.step()


def test_what_an_encoder_made_with_earlier_weights_is_not_stored_under_later_ones(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert named(engine, "cat", "cat", "cat") == len(PROMPT)
    engine.change_weights("later")
    assert named(engine, "outdated", "cat", "cat") == len(PROMPT)
    assert named(engine, "not stored", "cat", "new name") == len(PROMPT)
    engine.scheduler.reset_encoder_cache()
    engine.side.encoder_cleared()
    assert named(engine, "encoded again", "cat", "cat") == len(PROMPT) - WHOLE


def test_a_tensor_that_is_used_again_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digests, one, known = MediaDigests(), item(pixels=torch.zeros(3)), len(TENSORS._known)
    first = digests.extras([one], 64)
    monkeypatch.setattr("lmkv_client.connector.multimodal.blake3.AUTO", None, raising=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: pytest.fail("hashed again"))
    assert digests.extras([one], 64) == first
    assert MediaDigests().extras([one], 64) == first, "another connector of the engine"
    assert len(TENSORS._known) == known + 1
    del one
    assert len(TENSORS._known) == known


@pytest.mark.parametrize(
    "feature",
    [
        MultiModalFeatureSpec(None, "image", "at an encoder elsewhere", PlaceholderRange(0, 4)),
        item(address=7, monotonic_id=1, signature=[1, 2]),
        item(pixels=None),
        item(pixels=torch.zeros(0)),
        item(),
    ],
    ids=("none", "shm", "cached", "empty", "nothing"),
)
def test_an_item_whose_content_is_elsewhere_has_no_key(feature: MultiModalFeatureSpec) -> None:
    with pytest.raises(UnknownMedia, match="keeps the content of this image from the scheduler"):
        multimodal_extras([feature], 64)
