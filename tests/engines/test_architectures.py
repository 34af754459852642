"""Every kind of KV cache that lmkv serves, with every feature: what an engine generates is what it generates alone.

Three engines of each architecture of `tests.support.models`: `alone` has no connector, and says what is right; `first`
has a node with a disk; `second` has a node with a small pool. In float32 tokens are equal, and log probabilities up to
`TOLERANCE`, however a prompt is split. In bfloat16, and where vLLM's states depend on the split, `alone` splits it in
the same place, by a hit in vLLM's own prefix cache.

`make test` runs the architectures in `REPRESENTATIVE`, `make test-models` all of them. Not here: P/D (`test_pd.py`) and
ranks of tensor and pipeline parallelism (`test_tensor_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.engines.faults import ATTACHED, HEAL_SECONDS, kill
from tests.engines.llm import Answers, LlmAnswer, LlmFleet, LlmProcess, Nursery, make_prompt
from tests.engines.parts import NodeParts
from tests.support.models import ARCHITECTURES, Architecture, make_architecture
from tests.waiting import wait_until

REPRESENTATIVE = ("gemma3", "lfm2")
"""Windows beside full attention, and states. Plain attention is in every other test; local chunks, and layers that all
slide, are in the tests of the scheduler side."""

TOLERANCE = 1e-4
"""Of log probabilities in float32: splitting a prompt changes the order in which numbers are added."""
POISONED = 100 * TOLERANCE
MAX_TOKENS = 8
REPORT_TIMEOUT_SECONDS = 60.0
PROMPT_TOKENS = 1000
"""Longer than a window, a local chunk and three chunks; the last block is not full."""


class Served:
    """The engines of one architecture."""

    def __init__(self, name: str, fleet: LlmFleet) -> None:
        self.name = name
        self.architecture: Architecture = ARCHITECTURES[name]
        self.fleet = fleet
        self.alone: LlmProcess = fleet.engines["alone"]
        self.first: LlmProcess = fleet.engines["first"]
        self.second: LlmProcess = fleet.engines["second"]
        self._seed = 0

    @property
    def tolerance(self) -> float:
        """Of log probabilities."""
        return TOLERANCE if self.architecture.dtype == "float32" else 0.0

    def prompt(self, token_count: int = PROMPT_TOKENS, *, prefix: Sequence[int] = ()) -> list[int]:
        self._seed += 1
        return make_prompt(self._seed, token_count, prefix=prefix)

    def hit_tokens(self, token_count: int) -> int:
        """Tokens of the longest hit: a whole number of chunks that leaves a token to compute."""
        chunk_size = self.architecture.chunk_size
        return (token_count - 1) // chunk_size * chunk_size

    def store(self, engine: LlmProcess, prompt: Sequence[int]) -> LlmAnswer:
        """What an engine says to a prompt that it stores meanwhile, which is right."""
        answer = ask(engine, prompt)
        assert answer.cached_tokens == 0
        self.check(answer, prompt)
        return answer

    def check(
        self, answer: LlmAnswer, prompt: Sequence[int], *, cached_tokens: int = 0, after: Sequence[Sequence[int]] = ()
    ) -> None:
        """Asserts that an answer is right, and how much of the prompt was cached."""
        assert answer.cached_tokens == cached_tokens
        right = self.right(prompt, cached_tokens, after)
        assert answer.token_ids == right.token_ids
        assert difference(answer, right) <= self.tolerance

    def right(self, prompt: Sequence[int], cached_tokens: int, after: Sequence[Sequence[int]] = ()) -> LlmAnswer:
        """What the engine without a connector says.

        If that makes a difference, the prompt is split behind the cached tokens, or as it is after these other prompts.
        """
        self.alone.forget()
        if cached_tokens and not self.architecture.splits_exactly:
            for other in after or [prompt[: cached_tokens + 1]]:
                ask(self.alone, other)
            answer = ask(self.alone, prompt)
            assert answer.cached_tokens == cached_tokens
            return answer
        return ask(self.alone, prompt)

    def reported(self, engine: LlmProcess, prompt: Sequence[int]) -> None:
        """Waits until the coordinator knows of all chunks of a prompt at an engine's node."""
        self.fleet.coordinator.wait_for_holder(
            prompt, engine.name, self.hit_tokens(len(prompt)), REPORT_TIMEOUT_SECONDS
        )


def ask(engine: LlmProcess, prompt: Sequence[int]) -> LlmAnswer:
    """What an engine says to one prompt."""
    (answer,) = ask_all(engine, prompt).answers
    return answer


def ask_all(engine: LlmProcess, *prompts: Sequence[int]) -> Answers:
    """What an engine says to prompts that it gets at once."""
    return engine.ask(*prompts, max_tokens=MAX_TOKENS, logprobs=0)


def difference(one: LlmAnswer, other: LlmAnswer) -> float:
    """The largest difference between log probabilities."""
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in REPRESENTATIVE else pytest.mark.more_models) for name in ARCHITECTURES
    ],
)
def served(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The engines of one architecture, ready."""
    name: str = request.param
    architecture = ARCHITECTURES[name]
    model = make_architecture(tmp_path_factory.mktemp("models") / name, name)
    lmkv = {"chunk_size": str(architecture.chunk_size)}
    with LlmFleet(nursery, model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        dtype = architecture.dtype
        fleet.add("alone", transfer_config=None, dtype=dtype)
        disk = {"local_disk": str(fleet.runtime_dir / "disk"), "max_local_disk_size": "256MiB"}
        fleet.add("first", lmkv | disk, dtype=dtype)
        fleet.add("second", lmkv | {"max_local_cpu_size": "24MiB"}, dtype=dtype)
        fleet.add("keeper", lmkv | {"save_partial_chunks": "true"}, dtype=dtype)
        fleet.start()
        yield Served(name, fleet)


def test_the_kv_cache_is_that_of_the_engine_alone(served: Served) -> None:
    layout = served.first.kv_cache()
    assert layout == served.alone.kv_cache()
    assert len(layout.groups) == served.architecture.group_count
    parts = NodeParts(served.fleet, "first").spec.parts
    assert len(parts) == served.architecture.part_count


def test_a_prompt_is_stored_and_loaded_again(served: Served) -> None:
    prompt = served.prompt()
    served.store(served.first, prompt)
    served.first.forget()
    answers = ask_all(served.first, prompt)
    held = served.hit_tokens(PROMPT_TOKENS)
    served.check(answers.answers[0], prompt, cached_tokens=held)
    assert (answers.loaded_tokens, answers.peer_tokens) == (held, 0)


def test_the_next_turn_of_a_chat_computes_only_what_is_new(served: Served) -> None:
    keeper, first = served.fleet.engines["keeper"], served.prompt()
    answer = ask(keeper, first)
    keeper.forget()
    turn = served.prompt(PROMPT_TOKENS + MAX_TOKENS + 60, prefix=[*first, *answer.token_ids])
    computed_count = PROMPT_TOKENS + MAX_TOKENS - 1  # the last token of an answer has no KV
    spec = NodeParts(served.fleet, "keeper").spec
    end = computed_count if spec.ends_anywhere else served.hit_tokens(computed_count + 1)
    found = ask(keeper, turn)
    assert found.cached_tokens == end
    if served.architecture.splits_exactly:
        served.alone.forget()
        right = ask(served.alone, turn)
        assert found.token_ids == right.token_ids
        assert difference(found, right) <= served.tolerance


def test_a_prompt_that_a_peer_computed_is_loaded(served: Served) -> None:
    prompt = served.prompt()
    served.store(served.first, prompt)
    served.reported(served.first, prompt)
    answers = ask_all(served.second, prompt)
    held = served.hit_tokens(PROMPT_TOKENS)
    served.check(answers.answers[0], prompt, cached_tokens=held)
    assert answers.peer_tokens > 0
    again = served.second.ask_again(prompt, max_tokens=MAX_TOKENS, logprobs=0)
    served.check(again.answers[0], prompt, cached_tokens=held)
    assert again.peer_tokens == 0


def test_a_longer_prompt_loads_what_it_has_in_common_with_a_shorter_one(served: Served) -> None:
    shorter = served.prompt()
    served.store(served.first, shorter)
    common = served.hit_tokens(PROMPT_TOKENS)
    longer = served.prompt(PROMPT_TOKENS + 400, prefix=shorter[: common + 10])
    served.first.forget()
    served.check(ask(served.first, longer), longer, cached_tokens=common)
    served.first.forget()
    again = ask(served.first, longer)
    served.check(again, longer, cached_tokens=served.hit_tokens(len(longer)), after=[shorter, longer])


def test_prompts_that_part_inside_of_a_stored_one_hit_what_they_have_in_common_from_the_third_on(
    served: Served,
) -> None:
    """Windows are stored where prompts end, and where the second one shows that they part."""
    stored, common = served.prompt(), 2 * served.architecture.chunk_size
    if not NodeParts(served.fleet, "first").spec.ends_anywhere:
        pytest.skip("vLLM has states where steps end")
    served.store(served.first, stored)
    for number in range(2):
        served.first.forget()
        other = served.prompt(prefix=stored[: common + 10])
        answer = ask(served.first, other)
        served.check(answer, other, cached_tokens=common if number else answer.cached_tokens)


def test_lengths_around_the_edges_of_windows_chunks_and_blocks(served: Served) -> None:
    block_size, chunk_size = 128, served.architecture.chunk_size
    spans = {part.span for part in NodeParts(served.fleet, "first").spec.parts if part.span}
    edges = {block_size, chunk_size, 2 * chunk_size, 3 * chunk_size} | spans | {chunk_size + span for span in spans}
    prompts = [served.prompt(edge + offset) for edge in sorted(edges) for offset in (-1, 0, 1)]
    for prompt in prompts:
        assert ask(served.first, prompt).cached_tokens == 0
    served.first.forget()
    for prompt in prompts:
        answer = ask(served.first, prompt)
        # A whole prompt may be loaded: vLLM computes its last token again, in a step of its own or in that of the load.
        whole = len(prompt) // chunk_size * chunk_size
        assert answer.cached_tokens in (served.hit_tokens(len(prompt)), whole, min(whole, len(prompt) - 1))
        served.check(answer, prompt, cached_tokens=answer.cached_tokens)


def test_what_vllms_own_cache_has_is_continued_by_what_is_loaded(served: Served) -> None:
    prompt = served.prompt()
    chunk_size = served.architecture.chunk_size
    served.store(served.second, prompt)
    served.reported(served.second, prompt)
    ask(served.first, prompt[: chunk_size + 100])
    answers = ask_all(served.first, prompt)  # its own prefix cache has the first chunk
    held = served.hit_tokens(PROMPT_TOKENS)
    assert answers.cached_tokens == held
    assert 0 < answers.loaded_tokens < held
    if served.architecture.steps_exactly:
        served.check(answers.answers[0], prompt, cached_tokens=held)


def test_three_prompts_at_once(served: Served) -> None:
    one, other, new = (served.prompt() for _ in range(3))
    served.store(served.first, one)
    served.store(served.first, other)
    held = served.hit_tokens(PROMPT_TOKENS)
    right = [served.right(prompt, cached) for prompt, cached in ((one, held), (other, held), (new, 0))]
    served.first.forget()
    answers = ask_all(served.first, one, other, new)
    assert [answer.cached_tokens for answer in answers.answers] == [held, held, 0]
    if served.tolerance and served.architecture.steps_exactly:  # which requests share a step is not given
        assert answers.token_ids == [answer.token_ids for answer in right]
        assert max(map(difference, answers.answers, right)) <= served.tolerance


def test_each_part_is_what_is_computed_with(served: Served) -> None:
    held = served.hit_tokens(PROMPT_TOKENS)
    prompt = served.prompt(held + 2)  # a short convolution looks two tokens back
    right = served.store(served.first, prompt)
    parts = NodeParts(served.fleet, "first")
    for part in range(served.architecture.part_count):
        served.first.forget()
        with parts.poisoned(prompt[: held + 1], part):
            poisoned = ask(served.first, prompt)
        assert poisoned.cached_tokens == held
        assert difference(poisoned, right) > POISONED, f"part {part} is not used"
    served.first.forget()
    served.check(ask(served.first, prompt), prompt, cached_tokens=held)


def test_what_a_part_lacks_is_computed_and_stored_again(served: Served) -> None:
    held = served.hit_tokens(PROMPT_TOKENS)
    parts = NodeParts(served.fleet, "second")
    for part in range(served.architecture.part_count):
        prompt = served.prompt()
        served.store(served.second, prompt)
        parts.drop(prompt[: held + 1], part)
        served.second.forget()
        less = ask(served.second, prompt)
        assert less.cached_tokens < held
        served.check(less, prompt, cached_tokens=less.cached_tokens)
        served.second.forget()
        served.check(ask(served.second, prompt), prompt, cached_tokens=held)


def test_what_is_evicted_is_computed(served: Served) -> None:
    spec = NodeParts(served.fleet, "second").spec
    held = served.hit_tokens(PROMPT_TOKENS)
    prompt_count = (24 << 20) // sum(spec.part_bytes(item.part) for item in spec.items(held // spec.chunk_size)) + 2
    prompts = [served.prompt() for _ in range(min(prompt_count, 12))]
    for prompt in prompts:
        assert ask(served.second, prompt).cached_tokens == 0
    served.second.forget()
    cached = []
    for prompt in reversed(prompts):
        answer = ask(served.second, prompt)
        served.check(answer, prompt, cached_tokens=answer.cached_tokens)
        cached.append(answer.cached_tokens)
    assert cached[0] == held, "the latest is there"
    if prompt_count <= 12:
        assert cached[-1] < held, "the oldest is not"


def test_a_node_that_is_killed_finds_on_disk_what_it_had(served: Served) -> None:
    prompt, new = served.prompt(), served.prompt()
    served.store(served.first, prompt)
    held = served.hit_tokens(PROMPT_TOKENS)
    coordinator, name = served.fleet.coordinator, served.first.name
    NodeParts(served.fleet, name).wait_on_disk(prompt, served.fleet.runtime_dir / "disk")
    epoch, attached_count = coordinator.instances()[name].epoch, served.first.log().count(ATTACHED)
    kill(served.fleet.node_pid(name))
    served.first.forget()
    served.check(ask(served.first, new), new)  # by an engine without a node

    def is_back() -> bool:
        instance = coordinator.instances().get(name)
        is_attached = served.first.log().count(ATTACHED) > attached_count  # the engine knows it later than the node
        return instance is not None and instance.epoch != epoch and is_attached

    wait_until(is_back, "the engine has a node again", HEAL_SECONDS)
    served.reported(served.first, prompt)
    served.first.forget()
    answers = ask_all(served.first, prompt)
    served.check(answers.answers[0], prompt, cached_tokens=held)
    assert answers.grown['lmkv:tier_tokens_total{tier="disk"}'] > 0
