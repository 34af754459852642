"""Recompute audits of real engines compare the ends of prompts inside a chunk, in the tokens that both sides have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from lmkv_client.engine import Engine, Written
from tests.engines.llm import LlmFleet, LlmProcess, Nursery, make_prompt
from tests.engines.parts import NodeParts
from tests.engines.test_audits import CHUNK, LAST, outcomes

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """An engine in each of the element types, which audits every hit."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        for dtype in ("float32", "bfloat16"):
            fleet.add(dtype, {"audit_rate": "1", "save_partial_chunks": "true"}, dtype=dtype)
        fleet.start()
        yield fleet


@pytest.fixture(params=["float32", "bfloat16"])
def engine(fleet: LlmFleet, request: pytest.FixtureRequest) -> LlmProcess:
    """One of them."""
    return fleet.engines[request.param]


@pytest.mark.parametrize("max_tokens", [1, 16])
def test_ends_inside_a_chunk_are_equal(engine: LlmProcess, prompt: list[int], max_tokens: int) -> None:
    """Also where the held chunk has tokens of an answer, or where the prompt continues behind it."""
    engine.ask(prompt, max_tokens=max_tokens)
    for again in (prompt, prompt[:-30], [*prompt, *make_prompt(95, 10)], [*prompt, *make_prompt(94, CHUNK)]):
        answers = engine.ask_again(again, max_tokens=max_tokens)
        assert outcomes(answers) == {"equal": 2}, len(again)
        assert answers.cached_tokens == LAST * CHUNK


def test_a_wrong_end_inside_a_chunk_is_found(fleet: LlmFleet, engine: LlmProcess, prompt: list[int]) -> None:
    expected = engine.ask(prompt, max_tokens=1).token_ids
    plant_end(fleet, str(engine.options["dtype"]), prompt)
    answers = engine.ask_again(prompt, max_tokens=1)
    assert outcomes(answers) == {"equal": 1, "suspect": 1}
    if engine.options["dtype"] == "float32":
        assert answers.token_ids == expected


def plant_end(fleet: LlmFleet, name: str, prompt: Sequence[int]) -> None:
    """Stores the partial chunk at the end of a prompt again, with the heads in another order."""
    parts = NodeParts(fleet, name)
    config = {"node_address": str(fleet.runtime_dir / name / "engine.sock"), "lookup_timeout": "5"}
    with Engine.attach(parts.spec, config=config) as other:
        keys = other.keys(prompt, partial=True)
        with other.lookup(keys) as held:
            *_, end = held.load(timeout=10)
            shape = (parts.spec.layer_count, parts.spec.kv_head_count, -1)
            wrong = np.roll(np.frombuffer(end.view, np.uint16).reshape(shape), 1, axis=1)
        parts.drop_key(keys[-1])
        (extent,) = other.reserve(1, timeout=10)
        np.frombuffer(extent.view, np.uint16)[: wrong.size] = wrong.ravel()
        other.commit([Written(key=keys[-1], extent=extent, token_count=len(prompt) % CHUNK, parent=keys[-2])])
        assert other.missing(keys, timeout=10) == []
