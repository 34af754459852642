"""Real engines whose nodes share a store: what one has computed outlives it, its node, and the memory of both."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.process import session_pids
from tests.engines.faults import CHUNK_TOKENS, counting, eventually, kill
from tests.engines.llm import CALM, LlmFleet, Nursery, make_prompt
from tests.server.node.remote_parts import SharedFolder
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.engine

PROMPT_TOKENS = 2000
FOLDER_TOKENS = 768
HELD_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
HELD_TOKENS = HELD_CHUNKS * CHUNK_TOKENS


def test_an_engine_loads_what_another_has_computed_before_all_of_it_was_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    with RedisServer() as redis, tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        settings |= {"LMKV_REMOTE_URL": redis.url, "LMKV_REMOTE_LOOKUP_TIMEOUT": "5"}
        with Cluster(Path(folder), tiny_model, logs=tmp_path, settings=settings) as cluster:
            first = cluster.add_engine("engine-1", extra_arguments=("--shutdown-timeout", "0"))
            second = cluster.add_engine("engine-2")
            cluster.start_engines()
            tokens = make_prompt(1, PROMPT_TOKENS)
            expected = first.complete(tokens)
            assert expected.cached_tokens == 0
            eventually(lambda: len(redis.names()) > HELD_CHUNKS, "the prompt and the inputs of its KV are in the store")

            (node_pid,) = cluster.node_pids("engine-1")
            for pid in session_pids(first.pid):
                os.kill(pid, signal.SIGKILL)
            kill(node_pid)
            first.kill()  # waits
            coordinator = cluster.coordinator
            assert coordinator
            eventually(lambda: "engine-1" not in coordinator.instances(), "the instance has left the fleet")

            with counting(second) as grown:
                answer = second.complete(tokens)
                assert grown("load_failures") == 0
                assert grown("loaded_tokens") == grown("tier_tokens", "remote") == HELD_TOKENS
                assert grown("tier_tokens", "peers") == grown("tier_tokens", "disk") == 0
            assert answer.token_ids == expected.token_ids
            assert answer.cached_tokens == HELD_TOKENS
            assert f"Retrieved {HELD_TOKENS} of {HELD_TOKENS} tokens from the shared store, " in second.log()


def test_an_engine_that_was_killed_with_its_node_loads_from_the_folder_that_hosts_share(
    nursery: Nursery, tiny_model: Path, tmp_path: Path
) -> None:
    with SharedFolder() as folder, LlmFleet(nursery, tiny_model, tmp_path) as fleet:
        settings = {"remote_url": folder.url, "max_remote_size": "1GB", "remote_lookup_timeout": "5"}
        engine = fleet.add("engine", settings)
        fleet.start()
        prompt = make_prompt(1, FOLDER_TOKENS + 100)
        expected = engine.ask(prompt)
        assert expected.loaded_tokens == 0
        eventually(lambda: len(folder.names()) > FOLDER_TOKENS // CHUNK_TOKENS, "the prompt is in the folder")
        kill(fleet.node_pid("engine"))
        engine.kill()
        fleet.start()
        again = engine.ask(prompt)
        assert again.loaded_tokens == again.grown['lmkv:tier_tokens_total{tier="remote"}'] == FOLDER_TOKENS
        assert again.token_ids == expected.token_ids
