"""A real engine whose node has a disk: what it stored survives its node's memory, its node, and itself.

Host memory is no tier of its own there (`local_cpu: false`), as in LMCache's example of a disk.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lmkv.tiers import DISK
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import session_pids
from tests.engines.faults import ATTACHED, CHUNK_TOKENS, counting, eventually, kill
from tests.engines.llm import CALM, make_prompt

pytestmark = pytest.mark.engine

NAME = "engine-1"
PROMPT_TOKENS = 2000
HELD_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
HELD_CHUNKS = HELD_TOKENS // CHUNK_TOKENS
POOL_CHUNKS = 24
"""Three prompts, and some room."""


class Life(NamedTuple):
    epoch: int
    attached_count: int
    """How often its engine has logged that it is attached to a node, this one the last."""


class Disk:
    """An engine, its node, and the disk of both."""

    def __init__(self, cluster: Cluster, engine: EngineProcess) -> None:
        self.cluster = cluster
        self.engine = engine
        assert cluster.coordinator
        self._coordinator = cluster.coordinator
        self._seed = 0

    @property
    def chunk_count(self) -> int:
        """Chunks on disk, as the coordinator knows of."""
        instance = self._coordinator.instances()[NAME]
        return sum(usage.chunk_count for usage in instance.tiers if usage.tier == DISK)

    def stored(self) -> tuple[list[int], Completion]:
        """A new prompt that is on disk, and what the engine made of it."""
        self._seed += 1
        tokens, before = make_prompt(self._seed, PROMPT_TOKENS), self.chunk_count
        answer = self.engine.complete(tokens)
        assert answer.cached_tokens == 0
        eventually(lambda: self.chunk_count >= before + HELD_CHUNKS, "the prompt is on disk")
        return tokens, answer

    def loaded(self, tokens: list[int], expected: Completion) -> None:
        """Asserts that the engine loads all of a prompt that is held, and says what it said before."""
        self.engine.reset_prefix_cache()
        with counting(self.engine) as grown:
            answer = self.engine.complete(tokens)
            assert grown("load_failures") == 0
            assert grown("loaded_tokens") == grown("tier_tokens", "disk") == HELD_TOKENS
            assert grown("tier_tokens", "peers") == grown("tier_tokens", "remote") == 0
        assert f"Retrieved {HELD_TOKENS} of {HELD_TOKENS} tokens from disk, " in self.engine.log()
        assert answer.token_ids == expected.token_ids
        assert answer.cached_tokens == HELD_TOKENS

    def wait_attached(self, before: Life) -> None:
        """Waits until the engine is attached to another node than before, and both know it."""

        def is_back() -> bool:
            instance = self._coordinator.instances().get(NAME)
            known = instance is not None and instance.epoch != before.epoch and instance.engine_count > 0
            return known and self.engine.log().count(ATTACHED) > before.attached_count

        eventually(is_back, "the engine has a node again")

    def kill_node(self) -> Life:
        before = Life(self._coordinator.instances()[NAME].epoch, self.engine.log().count(ATTACHED))
        (pid,) = self.cluster.node_pids(NAME)
        kill(pid)
        return before


@pytest.fixture(scope="module")
def disk(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """The engine, ready, with an empty disk."""
    logs = tmp_path_factory.mktemp("logs")
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        settings |= {
            "LMKV_MAX_LOCAL_CPU_SIZE": f"{POOL_CHUNKS}MiB",
            "LMKV_LOCAL_CPU": "false",
            "LMKV_LOCAL_DISK": f"{folder}/disk",
            "LMKV_MAX_LOCAL_DISK_SIZE": "1GB",
        }
        with Cluster(Path(folder), tiny_model, logs=logs, settings=settings) as cluster:
            engine = cluster.add_engine(NAME, extra_arguments=("--shutdown-timeout", "0"))
            cluster.start_engines()
            yield Disk(cluster, engine)


def test_what_memory_has_no_room_for_is_loaded_from_disk(disk: Disk) -> None:
    first, expected = disk.stored()
    for _ in range(4):
        disk.stored()
    disk.loaded(first, expected)


def test_a_node_that_is_killed_finds_what_it_had(disk: Disk) -> None:
    tokens, expected = disk.stored()
    before = disk.chunk_count
    disk.wait_attached(disk.kill_node())
    eventually(lambda: disk.chunk_count == before, "the new node has the chunks of the old one")
    disk.loaded(tokens, expected)


def test_an_engine_that_is_killed_with_its_node_finds_what_it_had(disk: Disk) -> None:
    tokens, expected = disk.stored()
    for pid in session_pids(disk.engine.pid):
        os.kill(pid, signal.SIGKILL)
    killed = disk.kill_node()
    disk.engine.kill()  # waits
    disk.cluster.start_engines()
    disk.wait_attached(killed)
    disk.loaded(tokens, expected)
