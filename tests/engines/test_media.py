"""Pictures in prompts: KV is loaded for the picture that it was computed with, whatever the picture is called.

Four engines with one node. `first` and `second` have no cache of pictures or prompts of their own, so vLLM names their
pictures by counters of their processes, which are equal. `naming` uses the names that callers give, and its processor
has other options. `urgent` computes urgent prompts first, and has room for few pictures and prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.engines.llm import LlmFleet, LlmProcess, Nursery, Picture, auditing, make_prompt
from tests.support.models import PICTURE_SIZE, PICTURE_TOKENS, make_unusual

CHUNK = 64
PROMPT = make_prompt(1, 200)
WHOLE = (PICTURE_TOKENS + len(PROMPT)) // CHUNK * CHUNK
ENCODED_PICTURES = 4
"""Pictures whose embeddings the encoder cache of the engine `urgent` holds."""
PAGES = 18
"""Pages of that engine: enough for two prompts, and not for both their answers of `LONG_TOKENS`."""
LONG_TOKENS = 40
OTHER_COLOURS = {"image_mean": [0.0, 0.0, 0.0]}
"""Options of the processor."""


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines, ready; nothing is stored."""
    model = make_unusual(tmp_path_factory.mktemp("models") / "pictures", "pictures")
    settings = {"chunk_size": str(CHUNK)}
    plain: dict[str, Any] = {"block_size": 32, "max_model_len": 1024, "mm_processor_cache_gb": 0}
    counting = plain | {"enable_prefix_caching": False}
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("first", settings, **counting)
        fleet.start()
        settings["node_address"] = str(fleet.runtime_dir / "first" / "engine.sock")
        fleet.add("second", settings, **counting)
        fleet.add("naming", settings, mm_processor_kwargs={"image_std": [1.0, 1.0, 1.0]}, **plain)
        fleet.add(
            "urgent",
            settings,
            scheduling_policy="priority",
            num_gpu_blocks_override=PAGES,
            **plain
            | {"max_model_len": 512, "max_num_batched_tokens": ENCODED_PICTURES * PICTURE_TOKENS, "max_num_seqs": 4},
        )
        fleet.start()
        yield fleet


def picture(seed: int, uuid: str = "", processor: Mapping[str, Any] | None = None) -> Picture:
    return Picture(seed=seed, size=PICTURE_SIZE, uuid=uuid, processor=processor or {})


def computed(engine: LlmProcess, shown: Picture | None) -> tuple[int, ...]:
    """What the engine answers without any hit, which it stores."""
    answers = engine.ask(PROMPT, picture=shown)
    tokens = WHOLE if shown else len(PROMPT) // CHUNK * CHUNK
    assert (answers.cached_tokens, answers.stored_tokens) == (0, tokens)
    right = engine.ask(PROMPT, picture=shown, salt=f"of {shown}")
    assert (right.cached_tokens, right.token_ids) == (0, answers.token_ids)
    return answers.token_ids[0]


def loaded(engine: LlmProcess, shown: Picture) -> tuple[int, ...]:
    """What the engine answers with what is stored."""
    answers = engine.ask(PROMPT, picture=shown)
    assert answers.loaded_tokens == WHOLE
    return answers.token_ids[0]


def test_pictures_that_engines_name_by_equal_counters_are_not_confused(fleet: LlmFleet) -> None:
    """The picture is the first of each process."""
    first, second = fleet.engines["first"], fleet.engines["second"]
    of_one = computed(first, picture(1))
    of_other = computed(second, picture(2))
    of_text = computed(first, None)
    assert len({of_one, of_other, of_text}) == 3, "the pictures make no difference"
    assert loaded(second, picture(1)) == of_one, "an engine loads what the other one has computed"
    assert loaded(first, picture(2)) == of_other


def test_prompts_with_pictures_are_audited(fleet: LlmFleet) -> None:
    engine, shown = fleet.engines["first"], picture(8)
    computed(engine, shown)
    answers = engine.ask(PROMPT, picture=shown, **auditing("picture"))
    assert answers.audited_chunks == {"equal": WHOLE // CHUNK}


def test_options_of_the_processor_that_change_what_the_model_sees_count(fleet: LlmFleet) -> None:
    first, second = fleet.engines["first"], fleet.engines["second"]
    usual = computed(first, picture(3))
    changed = computed(second, picture(3, processor=OTHER_COLOURS))
    assert changed != usual, "the option makes no difference"
    assert loaded(first, picture(3, processor=OTHER_COLOURS)) == changed
    assert loaded(second, picture(3)) == usual
    fleet.engines["naming"].forget()
    assert computed(fleet.engines["naming"], picture(3)) not in (usual, changed)


def test_a_name_that_a_caller_chose_for_two_pictures_answers_no_other_caller(fleet: LlmFleet) -> None:
    """vLLM shows its model the first one for both."""
    naming = fleet.engines["naming"]
    mine = computed(naming, picture(4, uuid="chosen"))
    naming.forget()
    confused = naming.ask(PROMPT, picture=picture(5, uuid="chosen"))
    assert (confused.cached_tokens, confused.stored_tokens) == (0, 0)
    naming.forget()
    assert computed(naming, picture(5)) != mine
    naming.forget()
    assert loaded(naming, picture(4, uuid="another name")) == mine, "the content counts"


def test_a_prompt_that_waits_while_another_picture_gets_its_name_is_not_stored(fleet: LlmFleet) -> None:
    """The encoder sees the urgent prompt's picture first, and vLLM computes both prompts with it."""
    urgent = fleet.engines["urgent"]
    waiting, overtaking = picture(6, uuid="shared"), picture(7, uuid="shared")
    both = urgent.ask(PROMPT, PROMPT, pictures=[waiting, overtaking], priorities=[1, 0])
    right = urgent.ask(PROMPT, picture=picture(6), salt="computed")
    assert (right.cached_tokens, right.token_ids[0] == both.token_ids[0]) == (0, False), "vLLM confuses no pictures"
    urgent.forget()
    assert (both.stored_tokens, computed(urgent, picture(6))) == (0, right.token_ids[0])


def test_a_preempted_prompt_whose_picture_another_one_has_replaced_meanwhile_is_not_stored(fleet: LlmFleet) -> None:
    """Urgent prompts take its pages, their pictures its picture's place in the encoder cache, and the last its name."""
    urgent = fleet.engines["urgent"]
    before = urgent.metrics()["vllm:num_preemptions_total"]
    others = [picture(20 + number) for number in range(ENCODED_PICTURES)]
    pictures = [picture(8, uuid="replaced"), *others, picture(9, uuid="replaced")]
    answers = urgent.ask(
        *[PROMPT] * len(pictures),
        pictures=pictures,
        priorities=[9, *range(1, len(pictures))],
        first_begins=True,
        max_tokens=LONG_TOKENS,
    )
    assert urgent.metrics()["vllm:num_preemptions_total"] > before
    turn = [*PROMPT, *answers.token_ids[0]]
    right = urgent.ask(turn, picture=picture(8), salt="computed", logprobs=1)
    urgent.forget()
    again = urgent.ask(turn, picture=picture(8), logprobs=1)
    assert again.loaded_tokens == WHOLE, "the rest was computed after the preemption"
    assert again.answers[0].logprobs == pytest.approx(right.answers[0].logprobs, abs=1e-3)
