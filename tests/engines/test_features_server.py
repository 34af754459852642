"""What only a server of several processes shows: two engines as data-parallel ranks, and an end in good order.

Both ranks attach to one node, since they are given one configuration.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import EngineProcess
from tests.engines.llm import (
    CALM,
    READY_TIMEOUT_SECONDS,
    STOP_TIMEOUT_SECONDS,
    LlmFleet,
    LlmProcess,
    Nursery,
    make_prompt,
)

pytestmark = [pytest.mark.engine, pytest.mark.in_order]

NAME = "two"
RANKS = ("0", "1")


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A server of two ranks, ready."""
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    logs = tmp_path_factory.mktemp("logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=logs, settings=settings, coordinator=False) as cluster,
    ):
        engine = cluster.add_engine(
            NAME,
            kv_cache_bytes=64 << 20,
            extra_arguments=(
                "--data-parallel-size",
                str(len(RANKS)),
                "--shutdown-timeout",
                "60",
                "--distributed-executor-backend",
                "uni",
            ),
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        engine.ready_timeout_seconds = READY_TIMEOUT_SECONDS  # four processes import vLLM
        cluster.start_engines()
        yield cluster


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery, tiny_model: Path, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlmFleet]:
    """`bare`, without lmkv, and `next` at the node of the server's ranks, both ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs")) as fleet:
        fleet.add("bare", transfer_config=None)
        fleet.add("next", {"node_address": str(cluster.runtime_dir / NAME / "engine.sock")})
        fleet.start()
        yield fleet


@pytest.fixture(scope="module")
def bare(fleet: LlmFleet) -> LlmProcess:
    """The engine whose answers are right."""
    return fleet.engines["bare"]


def test_ranks_of_one_server_load_what_either_has_stored(cluster: Cluster, bare: LlmProcess, seed: int) -> None:
    engine = cluster.engines[NAME]
    prompts = [make_prompt(seed + number, 1000) for number in range(4)]
    expected = bare.compute(*prompts)
    assert ask_all(engine, prompts) == expected
    assert sum(loaded_tokens(engine)) == 0
    rounds = 0
    while sum(loaded_tokens(engine)) < 3 * 4 * 768 or not all(loaded_tokens(engine)):
        rounds += 1
        assert rounds < 50, "what is stored is loaded; each rank has loaded, and each counts for itself"
        engine.reset_prefix_cache()  # vLLM leaves it undone while a store holds blocks
        assert ask_all(engine, prompts[::-1]) == expected[::-1]
    assert len(cluster.node_pids()) == 1


def test_a_stopping_server_finishes_its_answers_and_leaves_them_in_the_pool(
    cluster: Cluster, fleet: LlmFleet, bare: LlmProcess, seed: int
) -> None:
    engine = cluster.engines[NAME]
    prompt = make_prompt(seed, 1000)
    (expected,) = bare.compute(prompt, max_tokens=40)
    stream = engine.stream(prompt, 40)
    said = list(next(stream).token_ids)
    engine.request_stop()
    said += [token for event in stream for token in event.token_ids]
    assert tuple(said) == expected
    engine.stop(STOP_TIMEOUT_SECONDS)
    assert "lmkv_client/" not in engine.log(), "no traceback goes through lmkv; vLLM's own server may fall over its end"
    answers = fleet.engines["next"].ask(prompt + said)
    assert answers.loaded_tokens == 1024
    assert answers.token_ids == bare.ask(prompt + said).token_ids


def ask_all(engine: EngineProcess, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What it says to prompts that come at once, so that both ranks have some."""
    with ThreadPoolExecutor(len(prompts)) as clients:
        return [completion.token_ids for completion in clients.map(engine.complete, prompts)]


def loaded_tokens(engine: EngineProcess) -> list[float]:
    """What each rank has loaded so far."""
    return [engine.metrics(engine=rank)["lmkv:loaded_tokens_total"] for rank in RANKS]
