"""The page's `config.yaml` with two replicas, each on a machine of its own: what one computed the other one loads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.process import ServerProcess, free_port
from tests.engines.llm import LlmProcess, make_prompt
from tests.ray.hosts import NAMES, SERVE_TIMEOUT_SECONDS, Hosts, interrupt, until
from tests.ray.page import Page

PROMPT = make_prompt(1, 1100)
HELD_TOKENS = 1024
"""Of the prompt, in whole chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What `serve run` runs."""

    process: ServerProcess
    endpoint: Endpoint
    coordinator: CoordinatorProcess
    expected: tuple[int, ...]
    """What an engine alone says to the prompt."""

    def holders(self) -> dict[str, int]:
        """Tokens of the prompt by the machines that hold some."""
        return self.coordinator.holders(PROMPT)


@pytest.fixture(scope="module")
def served(
    hosts: Hosts, page: Page, model: Path, coordinator: CoordinatorProcess, alone: LlmProcess
) -> Iterator[Served]:
    """Two replicas that both have a node, and answer."""
    port = free_port()
    endpoint = Endpoint("serve", port, "qwen-0.5b")
    (expected,) = alone.compute(PROMPT)
    with hosts.serve_run(page.small_config("config.yaml", model, port, num_replicas=2)) as process:

        def serves() -> bool:
            return coordinator.instances().keys() == set(NAMES) and endpoint.answers("/v1/models")

        process.wait_until(serves, "ready", SERVE_TIMEOUT_SECONDS)
        yield Served(process=process, endpoint=endpoint, coordinator=coordinator, expected=expected)


def test_a_replica_loads_what_another_one_has_computed(served: Served, hosts: Hosts) -> None:
    first = served.endpoint.complete(PROMPT, stream=False)
    assert first.cached_tokens == 0
    assert first.token_ids == served.expected
    until(lambda: HELD_TOKENS in served.holders().values(), "the prompt was stored")

    def both_have_it() -> bool:
        answer = served.endpoint.complete(PROMPT, stream=False)  # Serve chooses the replica
        assert answer.cached_tokens >= HELD_TOKENS
        assert answer.token_ids == served.expected
        return served.holders() == dict.fromkeys(NAMES, HELD_TOKENS)

    until(both_have_it, "both replicas answered")


def test_ray_exports_the_counters_of_the_engines(served: Served, hosts: Hosts) -> None:
    def fetched() -> float:
        name = 'ray_lmkv_tier_tokens_total{tier="peers"}'
        return sum(host.metrics.metrics().get(name, 0.0) for host in hosts.hosts.values())

    until(lambda: fetched() >= HELD_TOKENS, "Ray exported what the second replica fetched")


def test_a_killed_replica_takes_its_processes_with_it_and_its_node_follows(served: Served, hosts: Hosts) -> None:
    (replica,) = hosts.hosts["host-2"].pids("LLMServer")
    assert len(hosts.engine_pids("host-2")) > 1
    before = set(hosts.engine_pids("host-2"))
    assert hosts.node_pids("host-2")
    os.kill(replica, signal.SIGKILL)
    until(lambda: not before & set(hosts.engine_pids("host-2")), "the engine ended")
    answer = served.endpoint.complete(PROMPT, stream=False)
    assert answer.token_ids == served.expected
    assert answer.cached_tokens >= HELD_TOKENS
    until(lambda: not hosts.node_pids("host-2"), "the node ended")


def test_ctrl_c_leaves_nothing(served: Served, hosts: Hosts) -> None:
    interrupt(served.process)
    until(lambda: not served.process.alive, "serve ended")
    until(lambda: not hosts.engine_pids(), "the engines ended")
    until(lambda: not hosts.node_pids(), "the nodes ended")
