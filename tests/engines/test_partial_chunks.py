"""Prompts and answers whose last chunk is not full: kept with `save_partial_chunks`, and found by their tokens.

`keeper`, `follower` and `archivist` have it on, the last one with a disk; `discarder` has it off. All know the
vocabulary of Llama 3, and have blocks as large as chunks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lmkv.tiers import DISK
from tests.engines.faults import eventually
from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt

pytestmark = pytest.mark.engine

TOKENS = [128000, 849, 21435, 279, 26431, 315, 85748, 6636, 304, 4221, 4211, 13]
"""What Llama's tokenizer makes of "Explain the significance of KV cache in language models."."""
ANSWER_TOKENS = 16
KEPT_ANSWER_TOKENS = ANSWER_TOKENS - 1
"""The last token of an answer has no KV."""
FULL_POOL = "8MiB"
REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, llama_vocab_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, llama_vocab_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("keeper", {"save_partial_chunks": "true"}, block_size=256)
        fleet.add("follower", {"save_partial_chunks": "true"}, block_size=256)
        disk = {"local_disk": str(fleet.runtime_dir / "disk"), "max_local_disk_size": "1GB"}
        fleet.add("archivist", {"save_partial_chunks": "true"} | disk, block_size=256)
        fleet.add("discarder", block_size=256)
        small = {"save_partial_chunks": "true", "max_local_cpu_size": FULL_POOL}
        fleet.add("full", small, block_size=256)
        fleet.start()
        yield fleet


@pytest.fixture(scope="module")
def keeper(fleet: LlmFleet) -> LlmProcess:
    return fleet.engines["keeper"]


def lookup(fleet: LlmFleet, tokens: Sequence[int], *flags: str) -> str:
    """What `lmkv lookup` prints."""
    return run(fleet, "lookup", "--tokens", ",".join(map(str, tokens)), *flags)


def run(fleet: LlmFleet, *arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "lmkv", *arguments, "--coordinator", fleet.coordinator.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def holders(fleet: LlmFleet, tokens: Sequence[int]) -> list[tuple[str, str, int]]:
    """Instance, tier and count of tokens of all that `lmkv lookup` finds."""
    answer: dict[str, Any] = json.loads(lookup(fleet, tokens, "--json"))
    return [
        (holder["instance_id"], run["tier"], run["token_count"])
        for holder in answer["holders"]
        for run in holder["runs"]
    ]


def test_a_lookup_of_a_short_prompt_names_complete_holders(fleet: LlmFleet, keeper: LlmProcess) -> None:
    assert keeper.ask(TOKENS).stored_tokens == 12 + 12 + KEPT_ANSWER_TOKENS, "the prompt, and with the answer"
    fleet.coordinator.wait_for_holder(TOKENS, "keeper", 12, REPORT_TIMEOUT_SECONDS)
    assert holders(fleet, TOKENS) == [("keeper", "host", 12)]
    assert lookup(fleet, TOKENS).splitlines()[1].split() == ["keeper", "host", "12", "1"]


def test_the_same_short_prompt_is_loaded(keeper: LlmProcess) -> None:
    prompt = [15, *TOKENS[1:]]
    (expected,) = keeper.compute(prompt)
    keeper.ask(prompt)
    again = keeper.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens) == ([expected], 12 - 1), "the engine computes the last one"


def test_in_a_full_pool_the_manuals_short_prompt_is_found_loaded_and_moved(fleet: LlmFleet) -> None:
    engine, prompt = fleet.engines["full"], [16, *TOKENS[1:]]
    (expected,) = engine.compute(prompt)
    fill_pool(engine, first=100)
    assert engine.ask(prompt).token_ids == [expected]
    fill_pool(engine, first=1000, count=1)
    fleet.coordinator.wait_for_holder(prompt, "full", len(prompt), REPORT_TIMEOUT_SECONDS)
    assert holders(fleet, prompt) == [("full", "host", 12)]
    assert holders(fleet, prompt[:10]) == [("full", "host", 10)]
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens) == ([expected], 12 - 1)
    branch = [*prompt[:10], *make_prompt(50, 30)]
    loaded = engine.ask_again(branch)
    assert (loaded.token_ids, loaded.loaded_tokens) == (engine.compute(branch), 10)
    explained = run(fleet, "explain", "--tokens", ",".join(map(str, prompt)), "--instance", "full")
    assert explained.splitlines()[1].split() == ["full", "0-11", "host"]
    moved = run(fleet, "move", "--from", "full", "--to", "follower", "--tokens", ",".join(map(str, prompt)))
    assert "12 tokens" in moved
    other = fleet.engines["follower"].ask(prompt)
    assert other.token_ids == [expected]
    assert other.loaded_tokens >= 12 - 1, "all of them if they are loaded beside the steps"


def fill_pool(engine: LlmProcess, *, first: int, count: int = 40) -> None:
    """Asks for other prompts: by default more than the pool of `FULL_POOL` has room for."""
    for seed in range(first, first + count):
        engine.ask(make_prompt(seed, 300), max_tokens=1)


def test_without_partial_chunks_a_lookup_of_a_short_prompt_finds_no_instance(fleet: LlmFleet) -> None:
    prompt = [14, *TOKENS[1:]]
    engine = fleet.engines["discarder"]
    full = make_prompt(1, 300)
    assert engine.ask(prompt).stored_tokens == 0
    assert engine.ask(full).stored_tokens == 256
    fleet.coordinator.wait_for_holder(full, "discarder", 256, REPORT_TIMEOUT_SECONDS)  # it has reported what it has
    assert "no instance holds any of it" in lookup(fleet, prompt)
    assert engine.ask_again(prompt).loaded_tokens == 0


def test_a_long_prompt_is_loaded_to_its_last_token(keeper: LlmProcess) -> None:
    prompt = make_prompt(2, 1000)
    expected = keeper.compute(prompt)
    assert keeper.ask(prompt).stored_tokens == 1000 + 1000 % 256 + KEPT_ANSWER_TOKENS
    again = keeper.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens) == (expected, 1000 - 1)


def test_a_partial_chunk_serves_a_longer_prompt(keeper: LlmProcess) -> None:
    prompt = make_prompt(3, 1000)
    keeper.ask(prompt)
    longer = make_prompt(4, 1100, prefix=prompt)
    first = keeper.ask_again(longer)
    assert first.loaded_tokens == 1000
    expected = keeper.compute(longer)
    assert first.token_ids == expected
    again = keeper.ask_again(longer)
    assert (again.token_ids, again.loaded_tokens) == (expected, 1100 - 1)


def test_every_turn_of_a_chat_is_loaded_to_the_last_token_that_was_stored(keeper: LlmProcess) -> None:
    chat = make_prompt(20, 300)
    kept = 0
    for turn, answer_tokens in enumerate((30, 200, 1, 16)):
        expected = keeper.compute(chat, max_tokens=answer_tokens)
        answers = keeper.ask_again(chat, max_tokens=answer_tokens)
        assert (answers.token_ids, answers.loaded_tokens) == (expected, kept), f"turn {turn}"
        kept = len(chat) + answer_tokens - 1
        chat = make_prompt(21 + turn, kept + 1 + 45, prefix=[*chat, *answers.token_ids[0]])


def test_a_branch_of_a_chat_is_loaded_to_where_it_branches_at_a_stored_end(keeper: LlmProcess) -> None:
    prompt = make_prompt(30, 270)
    keeper.ask(prompt, max_tokens=40)
    branch = make_prompt(31, 320, prefix=prompt)
    answers = keeper.ask_again(branch)
    assert (answers.token_ids, answers.loaded_tokens) == (keeper.compute(branch), 270)


def test_the_next_turn_at_another_engine_is_fetched_to_the_last_token_that_was_stored(
    fleet: LlmFleet, keeper: LlmProcess
) -> None:
    prompt = make_prompt(40, 300)
    said = [*prompt, *keeper.ask(prompt, max_tokens=30).token_ids[0]]
    kept = len(said) - 1
    fleet.coordinator.wait_for_holder(said[:kept], "keeper", kept, REPORT_TIMEOUT_SECONDS)
    turn = make_prompt(41, 400, prefix=said)
    expected = keeper.compute(turn)
    answers = fleet.engines["follower"].ask(turn)
    assert (answers.token_ids, answers.peer_tokens) == (expected, kept)


def test_after_a_restart_the_next_turn_is_loaded_from_disk_to_the_last_token_that_was_stored(fleet: LlmFleet) -> None:
    engine = fleet.engines["archivist"]
    prompt = make_prompt(50, 512)
    said = [*prompt, *engine.ask(prompt, max_tokens=40).token_ids[0]]
    turn = make_prompt(51, 600, prefix=said)
    expected = engine.compute(turn)

    def on_disk() -> int:
        tiers = fleet.coordinator.instances()["archivist"].tiers
        return sum(usage.chunk_count for usage in tiers if usage.tier == DISK)

    eventually(lambda: on_disk() >= 3 + 3, "both prompts are on disk, with the end of the first")
    os.kill(fleet.node_pid("archivist"), signal.SIGKILL)
    engine.kill()
    fleet.start()
    answers = engine.ask(turn)
    assert (answers.token_ids, answers.loaded_tokens) == (expected, len(said) - 1)
    assert answers.grown['lmkv:tier_tokens_total{tier="disk"}'] == len(said) - 1


def test_prompts_with_a_common_prefix_are_distinguished(keeper: LlmProcess) -> None:
    begin = make_prompt(5, 512)
    prompts = [make_prompt(seed, length, prefix=begin) for seed, length in ((6, 513), (7, 600), (8, 600), (9, 767))]
    expected = keeper.compute(*prompts)
    assert keeper.ask(*prompts).token_ids == expected
    again = keeper.ask_again(*prompts)
    assert again.token_ids == expected
    assert keeper.ask_again(prompts[0]).loaded_tokens == 513 - 1


def test_a_partial_chunk_comes_from_a_peer_to_whom_keeps_them_too(fleet: LlmFleet, keeper: LlmProcess) -> None:
    prompt = make_prompt(10, 700)
    expected = keeper.ask(prompt).token_ids
    fleet.coordinator.wait_for_holder(prompt, "keeper", 700, REPORT_TIMEOUT_SECONDS)
    for name, token_count in (("discarder", 512), ("follower", 700)):
        answers = fleet.engines[name].ask(prompt)
        assert (answers.token_ids, answers.peer_tokens) == (expected, token_count)
