"""A real engine whose node keeps its pool: after a kill of either, the next request hits in host memory."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import session_pids
from tests.engines.faults import ATTACHED, CHUNK_TOKENS, HEAL_SECONDS, counting, eventually
from tests.engines.llm import CALM, make_prompt

pytestmark = pytest.mark.engine

NAME = "engine-1"
PROMPT_TOKENS = 2000
HELD_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS


class Warm:
    """An engine and its node."""

    def __init__(self, cluster: Cluster, engine: EngineProcess) -> None:
        self.engine = engine
        self.cluster = cluster
        assert cluster.coordinator
        self._coordinator = cluster.coordinator
        self._seed = 0

    def stored(self) -> tuple[list[int], Completion]:
        """A new prompt that is in host memory, and what the engine made of it."""
        self._seed += 1
        tokens = make_prompt(self._seed, PROMPT_TOKENS)
        answer = self.engine.complete(tokens)
        assert answer.cached_tokens == 0
        self.reported(tokens)
        return tokens, answer

    def reported(self, tokens: list[int]) -> None:
        """Waits until the fleet knows that the node holds a prompt."""
        self._coordinator.wait_for_holder(tokens, NAME, HELD_TOKENS, HEAL_SECONDS)

    def loaded(self, tokens: list[int], expected: Completion) -> None:
        """Asserts that the engine loads all of a prompt that is held, and says what it said before."""
        with counting(self.engine) as grown:
            answer = self.engine.complete(tokens)
            assert grown("load_failures") == 0
            assert grown("loaded_tokens") == HELD_TOKENS
            assert grown("tier_tokens", "peers") == 0
        assert answer.token_ids == expected.token_ids
        assert answer.cached_tokens == HELD_TOKENS

    @property
    def node_pid(self) -> int:
        """The node's process."""
        (pid,) = self.cluster.node_pids(NAME)
        return pid

    def end_node(self, how: signal.Signals) -> None:
        """Ends the node, and waits until the engine has started another one."""
        before, attached_count = self._coordinator.instances()[NAME].epoch, self.engine.log().count(ATTACHED)
        os.kill(self.node_pid, how)

        def is_back() -> bool:
            instance = self._coordinator.instances().get(NAME)
            known = instance is not None and instance.epoch != before and instance.engine_count > 0
            return known and self.engine.log().count(ATTACHED) > attached_count

        eventually(is_back, "the engine has a node again")


@pytest.fixture(scope="module")
def warm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """The engine, ready, with an empty pool on a tmpfs."""
    logs = tmp_path_factory.mktemp("logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        tempfile.TemporaryDirectory(prefix="warm-", dir="/dev/shm") as shared,
    ):
        settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
        settings |= {"LMKV_PERSIST_POOL": "true", "LMKV_POOL_PATH": f"{shared}/pool"}
        with Cluster(Path(folder), tiny_model, logs=logs, settings=settings) as cluster:
            engine = cluster.add_engine(NAME, extra_arguments=("--shutdown-timeout", "0"))
            cluster.start_engines()
            yield Warm(cluster, engine)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_a_node_that_ends_finds_its_memory_again_and_its_engine_hits(warm: Warm, how: signal.Signals) -> None:
    tokens, expected = warm.stored()
    warm.end_node(how)
    warm.reported(tokens)
    warm.engine.reset_prefix_cache()
    warm.loaded(tokens, expected)
    warm.stored()  # the engine's worker has let go of the old mapping by now


def test_an_engine_that_is_killed_beside_its_node_hits_at_once(warm: Warm) -> None:
    tokens, expected = warm.stored()
    node_pid = warm.node_pid
    for pid in session_pids(warm.engine.pid):
        os.kill(pid, signal.SIGKILL)
    warm.engine.kill()  # waits
    warm.cluster.start_engines()
    assert warm.node_pid == node_pid
    warm.loaded(tokens, expected)
