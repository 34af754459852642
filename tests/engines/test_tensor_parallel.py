"""Chunks do not depend on the number of ranks: engines of different tensor-parallel sizes share them.

`halves` runs on two ranks; `whole`, its peer, and `guest`, on the node of `halves`, on one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmkv_client.engine import Engine, Written
from tests.engines.llm import LlmFleet, Nursery, auditing, make_prompt
from tests.engines.parts import NodeParts

pytestmark = pytest.mark.engine

REPORT_TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("halves", tensor_parallel_size=2, environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
        fleet.add("whole")
        fleet.start()
        fleet.add("guest", {"node_address": str(fleet.runtime_dir / "halves" / "engine.sock")})
        fleet.start()
        for engine in fleet.engines.values():  # ranks map the pool in their first step, which waits only for a while
            engine.ask(make_prompt(0, 16))
        yield fleet


def test_two_ranks_store_and_load_through_one_node(fleet: LlmFleet, prompt: list[int]) -> None:
    engine = fleet.engines["halves"]
    expected = fleet.engines["whole"].compute(prompt)
    first = engine.ask(prompt)
    assert (first.token_ids, first.cached_tokens, first.stored_tokens) == (expected, 0, 768)
    again = engine.ask_again(prompt)
    assert (again.token_ids, again.loaded_tokens, again.peer_tokens) == (expected, 768, 0)
    assert again.grown["lmkv:loaded_bytes_total"] == 3 << 20, "both ranks together load each byte once"


@pytest.mark.parametrize("head", [0, 1])
def test_each_rank_audits_its_heads(fleet: LlmFleet, prompt: list[int], head: int) -> None:
    """Each of the two ranks has one of two heads, and finds what is wrong in it."""
    engine, parts = fleet.engines["halves"], NodeParts(fleet, "halves")
    engine.ask(prompt)
    assert engine.ask_again(prompt, **auditing(f"honest {head}")).audited_chunks == {"equal": 3}
    config = {"node_address": str(fleet.runtime_dir / "halves" / "engine.sock"), "save_partial_chunks": "false"}
    with Engine.attach(parts.spec, config=config) as writer:
        keys = writer.keys(prompt)
        with writer.lookup(keys) as held:
            last = np.frombuffer([*held.load(timeout=10)][2].view, np.float32).copy()
        heads = last.reshape(parts.spec.layer_count, parts.spec.kv_head_count, -1)
        heads[:, head] *= -1
        parts.drop(prompt, part=0)
        (extent,) = writer.reserve(1, timeout=10)
        np.frombuffer(extent.view, np.float32)[:] = last
        writer.commit([Written(key=keys[2], extent=extent, parent=keys[1])])
        assert writer.missing(keys, timeout=10) == []
    assert engine.ask_again(prompt, **auditing(f"wrong {head}")).audited_chunks == {"equal": 2, "suspect": 1}


@pytest.mark.parametrize(("writer", "reader"), [("halves", "guest"), ("guest", "halves")])
def test_engines_on_one_node_share_whatever_their_ranks(
    fleet: LlmFleet, prompt: list[int], writer: str, reader: str
) -> None:
    expected = fleet.engines[writer].ask(prompt).token_ids
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 0)


@pytest.mark.parametrize(("writer", "reader"), [("halves", "whole"), ("whole", "halves")])
def test_peers_share_whatever_their_ranks(fleet: LlmFleet, prompt: list[int], writer: str, reader: str) -> None:
    expected = fleet.engines[writer].ask(prompt).token_ids
    fleet.coordinator.wait_for_holder(prompt, writer, 768, REPORT_TIMEOUT_SECONDS)
    answers = fleet.engines[reader].ask(prompt)
    assert (answers.token_ids, answers.loaded_tokens, answers.peer_tokens) == (expected, 768, 768)
