"""Dynamo's KV router follows the caches of the simulated fleet. Needs `pip install ai-dynamo-runtime` (75 MB)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.replay.traces import Request, Trace
from benchmarks.systems.dynamo_selector import DynamoSelector, dynamo_problem
from lmkv.keys import ChunkKey

BLOCK_TOKENS = 512


def keys(*numbers: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(16, "big")) for number in numbers]


FIRST, SECOND = keys(*range(1, 15)), keys(*range(101, 115))


@pytest.fixture
def selector(tmp_path: Path) -> Iterator[DynamoSelector]:
    pytest.importorskip("dynamo.llm", reason="ai-dynamo-runtime is not installed")
    prompts = [Request(keys=prompt, token_count=0, stored=prompt) for prompt in (FIRST, SECOND)]
    trace = Trace(requests=prompts, chunk_tokens=BLOCK_TOKENS)
    with DynamoSelector(Path(sys.executable), tmp_path, trace, ["0", "1", "2"]) as running:
        yield running


def choose(selector: DynamoSelector, name: str, prompt: Sequence[ChunkKey]) -> str:
    """The choice for a request that is answered at once."""
    chosen = selector.choose(name, prompt)
    selector.computed(name)
    selector.answered(name)
    return chosen


def test_it_chooses_the_engine_that_holds_the_prompt(selector: DynamoSelector) -> None:
    selector.change("1", FIRST, [])
    selector.change("2", SECOND, [])
    assert [choose(selector, f"a{number}", FIRST) for number in range(5)] == ["1"] * 5
    assert [choose(selector, f"b{number}", SECOND[:9]) for number in range(5)] == ["2"] * 5
    selector.change("0", FIRST, [])
    selector.change("1", [], FIRST)
    assert [choose(selector, f"c{number}", FIRST) for number in range(5)] == ["0"] * 5


def test_it_counts_requests_until_they_are_answered(selector: DynamoSelector) -> None:
    busy = {selector.choose("a", FIRST), selector.choose("b", SECOND)}
    assert len(busy) == 2
    assert selector.choose("c", keys(7)) not in busy
    selector.computed("a")
    selector.answered("a")


def test_it_says_why_it_cannot_be_measured(tmp_path: Path) -> None:
    assert "was not given" in str(dynamo_problem(None))
    assert "there is no python" in str(dynamo_problem(tmp_path / "python"))
    python = tmp_path / "empty"
    python.symlink_to("/bin/false")
    assert "does not have it" in str(dynamo_problem(python))
