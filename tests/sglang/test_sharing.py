"""Real SGLang servers that load what another process has stored: after a restart, and at a peer."""

from __future__ import annotations

from tests.sglang.checks import check_hit
from tests.sglang.conftest import Fleet
from tests.sglang.engine import SglangProcess
from tests.sglang.prompts import PAGE_COUNT, make_prompt


def test_a_restarted_server_and_a_peer_load_what_the_first_has_stored(fleet: Fleet, alone: SglangProcess) -> None:
    prompts = [make_prompt(seed) for seed in (21, 22)]
    expected = [alone.answer(prompt).token_ids for prompt in prompts]
    first = fleet.engine("first")
    with first:
        cold = [first.answer(prompt) for prompt in prompts]
        assert [(answer.token_ids, answer.cached_tokens) for answer in cold] == [(ids, 0) for ids in expected]
        for prompt in prompts:
            fleet.wait_stored(prompt, "first")
    nodes = fleet.node_pids("first")
    assert len(nodes) == 1
    before = fleet.found_chunks("first", "own")
    with first:  # another process
        check_hits(first, prompts, expected)
    assert fleet.node_pids("first") == nodes
    assert fleet.found_chunks("first", "own") - before >= len(prompts) * PAGE_COUNT
    with fleet.engine("second", layout="layer_first") as second:  # layouts share
        check_hits(second, prompts, expected)
    assert fleet.found_chunks("second", "peers") >= len(prompts) * PAGE_COUNT
    fetched = fleet.metrics("second")['lmkv_node_tier_read_chunks_total{tier="peers"}']
    assert fetched >= len(prompts) * PAGE_COUNT
    assert len(fleet.coordinator.instances()["second"].specs) == 1
    assert specs_of(fleet, "second") == specs_of(fleet, "first")


def check_hits(engine: SglangProcess, prompts: list[list[int]], expected: list[tuple[int, ...]]) -> None:
    """Asks each prompt once: all of it but the last page is loaded, and the answers are those expected."""
    for prompt, own in zip(prompts, expected, strict=True):
        check_hit(engine, prompt, own)


def specs_of(fleet: Fleet, instance_id: str) -> set[bytes]:
    """Fingerprints of what an instance holds."""
    return {spec.fingerprint for spec in fleet.coordinator.instances()[instance_id].specs}
