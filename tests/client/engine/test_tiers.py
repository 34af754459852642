"""The engine API behind the pool: chunks on disk and on other nodes are loaded like those in the pool."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from lmkv.keys import ChunkKey
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.engine import Engine
from lmkv_client.engine.log import logger
from tests.client.engine.engines import Attach, content, load, prompt, store, words
from tests.client.engine.nodes import connector_config, kill, node_pid, until
from tests.waiting import WAIT_SECONDS


def own_count(engine: Engine, keys: list[ChunkKey]) -> int:
    """Chunks of a prompt in the pool, -1 if not all of it is held anywhere."""
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        return held.own_count if held.hit_count == len(keys) else -1


def test_chunks_on_disk_are_loaded_in_order(attach: Attach, runtime_dir: Path) -> None:
    engine = attach(
        max_local_cpu_size="512KiB",  # 64 chunks
        eviction_policy="lru",
        local_disk=(str(runtime_dir / "disk"),),
        max_local_disk_size=0.1,
    )
    keys = engine.keys(prompt(8))
    store(engine, keys)
    numbers = itertools.count()

    def is_on_disk() -> bool:
        """Stores other prompts, which take its place in the pool; and itself again if it was not on disk yet."""
        for _ in range(5):
            store(engine, engine.keys(prompt(16), salt=f"other {next(numbers)}"))
        count = own_count(engine, keys)
        if count < 0:
            store(engine, engine.missing(keys, timeout=WAIT_SECONDS))
        return 0 <= count < 4

    until(is_on_disk)
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        assert (held.hit_count, held.own_count < 4) == (8, True)
        assert len(list(held.load(5, timeout=WAIT_SECONDS))) == 5
        loaded = list(held.load(timeout=WAIT_SECONDS))  # the rest, by a second load
        assert all(np.array_equal(words(one), content(key)) for key, one in zip(keys, loaded, strict=True))
        assert len(held.begin_load().result(WAIT_SECONDS)) == 8
    assert engine.counters.failed_loads == 0


def test_chunks_of_another_node_are_fetched_and_the_log_names_it_once(
    attach: Attach, runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger.name)
    with CoordinatorProcess(tmp_path) as coordinator:
        one, other = (
            attach(instance_id=name, enable_p2p=True, coordinator_address=(coordinator.address,))
            for name in ("one", "other")
        )
        keys = one.keys(prompt(6))
        store(one, keys)

        def found() -> bool:
            with other.lookup(keys, timeout=WAIT_SECONDS) as held:
                assert held.own_count == 0
                return held.hit_count == 6

        until(found)
        assert other.missing(keys, timeout=WAIT_SECONDS) == keys
        assert load(other, keys) == 6
        assert own_count(other, keys) == 6
        assert one.counters.loaded_chunks == 0
        (connected,) = (line for line in caplog.messages if line.startswith("Connected to peer "))
        assert re.fullmatch(r"Connected to peer one at 127\.0\.0\.1:\d+, channel \w+", connected)


def test_a_load_that_fails_yields_what_came_before(attach: Attach, runtime_dir: Path, tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        one, other = (
            attach(instance_id=name, enable_p2p=True, coordinator_address=(coordinator.address,))
            for name in ("one", "other")
        )
        keys = one.keys(prompt(6))
        store(one, keys)
        store(other, keys[:2])

        def found() -> bool:
            with other.lookup(keys, timeout=WAIT_SECONDS) as held:
                return (held.own_count, held.hit_count) == (2, 6)

        until(found)
        with other.lookup(keys, timeout=WAIT_SECONDS) as held:
            assert len(list(held.load(timeout=0))) == 2
            kill(node_pid(connector_config(runtime_dir, instance_id="one")))
            assert len(list(held.load(timeout=WAIT_SECONDS))) == 2
        assert other.counters.failed_loads == 1
        assert own_count(other, keys[:2]) == 2
