"""Token-major chunks go between engines of any block size and number of ranks.

`coarse`, `fine` and `halves`, which runs on two ranks, have blocks of their own size. Chunks are of 100 tokens, so that
most of them begin and end within a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.llm import LlmFleet, Nursery, make_prompt

pytestmark = pytest.mark.engine

REPORT_TIMEOUT_SECONDS = 60.0
SETTINGS = {"kv_format": "token_major", "chunk_size": "100"}
BLOCK_SIZES = {"coarse": 128, "fine": 32, "halves": 64}
STORED = 1000
"""Tokens of full chunks in the prompts, which have ten tokens more."""


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("coarse", SETTINGS, block_size=BLOCK_SIZES["coarse"])
        fleet.add("fine", SETTINGS, block_size=BLOCK_SIZES["fine"])
        fleet.start()
        fleet.add(
            "halves",
            SETTINGS,
            {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
            block_size=BLOCK_SIZES["halves"],
            tensor_parallel_size=2,
        )
        fleet.start()
        yield fleet


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("coarse", "fine"), ("fine", "coarse"), ("halves", "coarse"), ("fine", "halves"), ("halves", "fine")],
)
def test_peers_share_whatever_their_blocks_and_ranks(fleet: LlmFleet, seed: int, writer: str, reader: str) -> None:
    prompt = make_prompt(seed, STORED + 10)
    first = fleet.engines[writer].ask(prompt)
    assert (first.cached_tokens, first.stored_tokens) == (0, STORED)
    fleet.coordinator.wait_for_holder(prompt, writer, STORED, REPORT_TIMEOUT_SECONDS)
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens) == (first.token_ids, STORED)
    assert answers.peer_tokens == STORED
    again = fleet.engines[writer].ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (first.token_ids, STORED, 0)


def test_a_longer_prompt_continues_within_a_block(fleet: LlmFleet) -> None:
    """What is stored of a prompt that shares its beginning starts in the middle of a block."""
    prompt = make_prompt(7, 250)
    longer = make_prompt(8, 710, prefix=prompt)
    expected = fleet.engines["coarse"].compute(longer)
    fleet.engines["fine"].ask(prompt)
    fleet.coordinator.wait_for_holder(prompt, "fine", 200, REPORT_TIMEOUT_SECONDS)
    second = fleet.engines["coarse"].ask(longer)
    assert (second.token_ids, second.loaded_tokens) == (expected, 200)
    stored = len(longer) // 100 * 100
    fleet.coordinator.wait_for_holder(longer, "coarse", stored, REPORT_TIMEOUT_SECONDS)
    third = fleet.engines["halves"].ask(longer)
    assert (third.token_ids, third.loaded_tokens) == (expected, stored)
