"""The page's `pd_app.py`, prefill and decode each on a machine of its own: lmkv first, NIXL for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import free_port
from tests.engines.llm import LlmProcess, make_prompt
from tests.ray.hosts import Hosts, until
from tests.ray.page import Page

HELD_TOKENS = 1024
"""Of a prompt of 1100, in whole chunks."""
LOADED_TOKENS = "ray_lmkv_loaded_tokens_total"
EXTERNAL_HITS = "ray_vllm_external_prefix_cache_hits_total"
"""Tokens that any of the connectors gave."""


@pytest.fixture(scope="module")
def served(hosts: Hosts, page: Page, model: Path) -> Iterator[Endpoint]:
    """The app, ready."""
    port = free_port()
    hosts.run_program(page.small_program("pd_app.py", model, port))
    yield Endpoint("serve", port, "qwen-0.5b")
    hosts.shut_down()


def counters(hosts: Hosts, name: str) -> dict[str, float]:
    """A counter of the engines as Ray exports it, by whether it is the prefill's or the decode's."""
    return {
        role: host.metrics.metrics().get(name, 0.0)
        for host in hosts.hosts.values()
        for role in ("Prefill:", "Decode:")
        if host.pids(role)
    }


def test_nixl_transfers_less_than_a_chunk(served: Endpoint, hosts: Hosts, alone: LlmProcess) -> None:
    prompt = make_prompt(11, 200)
    (expected,) = alone.compute(prompt)
    before, loaded = counters(hosts, EXTERNAL_HITS), counters(hosts, LOADED_TOKENS)
    answer = served.complete(prompt, stream=False)
    assert answer.token_ids == expected

    def transferred() -> bool:
        return counters(hosts, EXTERNAL_HITS)["Decode:"] - before["Decode:"] >= len(prompt) - 1

    until(transferred, "the decode had the prompt from elsewhere")
    assert counters(hosts, LOADED_TOKENS) == loaded


def test_lmkv_gives_both_what_they_have_evicted(served: Endpoint, hosts: Hosts, alone: LlmProcess) -> None:
    prompt = make_prompt(12, 1100)
    (expected,) = alone.compute(prompt)
    assert served.complete(prompt, stream=False).token_ids == expected
    for seed in range(13, 17):
        served.complete(make_prompt(seed, 1100), 1, stream=False)
    before = counters(hosts, LOADED_TOKENS)
    assert before.keys() == {"Prefill:", "Decode:"}
    answer = served.complete(prompt, stream=False)
    assert answer.token_ids == expected
    assert answer.cached_tokens >= HELD_TOKENS, "the prefill computed it again"

    def both_loaded() -> bool:
        after = counters(hosts, LOADED_TOKENS)
        return all(after[role] - before[role] >= HELD_TOKENS for role in before)

    until(both_loaded, "both engines loaded the prompt")


def test_shutdown_leaves_nothing(served: Endpoint, hosts: Hosts) -> None:
    hosts.shut_down()
    until(lambda: not hosts.engine_pids(), "the engines ended")
    until(lambda: not hosts.node_pids(), "the nodes ended")
