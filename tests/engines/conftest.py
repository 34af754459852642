"""Models and real vLLM engines for the tests in this folder. An engine takes half a minute to start: share it."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from lmkv_client.demo.model import LLAMA_VOCAB, MID, TINY, make_model
from lmkv_client.demo.process import RunningProcess, ServerProcess
from tests.engines.faults import FaultyPair
from tests.engines.llm import CALM, Nursery, make_prompt
from tests.engines.pd import Trio

ENGINE_TEST_TIMEOUT_SECONDS = 900
"""A hang: the first test of a module also waits for its engines."""

HERE = Path(__file__).parent

SETTINGS = {f"LMKV_{key.upper()}": value for key, value in CALM.items()} | {"LMKV_MAX_LOCAL_CPU_SIZE": "512MiB"}
"""Of servers: as other engines of the tests, and room for everything that a module stores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything here as a test with engines, and gives it the time they need."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(ENGINE_TEST_TIMEOUT_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def forked_servers(nursery: Nursery) -> Iterator[None]:
    """Servers are forked from a process that has vLLM imported: each would spend half a minute of a core on it."""
    others = ServerProcess.launch

    def launch(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> RunningProcess:
        return nursery.launch(command, log, environment) or others(command, log, environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerProcess, "launch", launch)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models below."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_model(models: Path) -> Path:
    """The fastest model that still has several layers and KV heads."""
    return make_model(models / "tiny", TINY)


@pytest.fixture(scope="session")
def other_tiny_model(models: Path) -> Path:
    """A model of the same shape as `tiny_model` with other weights, served under the same name."""
    return make_model(models / "other" / "tiny", TINY, seed=1)


@pytest.fixture(scope="session")
def mid_model(models: Path) -> Path:
    """A model heavy enough that a long prompt takes seconds."""
    return make_model(models / "mid", MID)


@pytest.fixture(scope="session")
def llama_vocab_model(models: Path) -> Path:
    """A tiny model with the vocabulary size of Llama 3."""
    return make_model(models / "llama_vocab", LLAMA_VOCAB)


@pytest.fixture(scope="session")
def shared_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyPair]:
    """Two engines that share; they were started before their coordinator. Every test leaves them so."""
    logs = tmp_path_factory.mktemp("pair-logs")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        FaultyPair(Path(folder), tiny_model, logs, seed=1, coordinator=False) as pair,
    ):
        pair.do_without_coordinator()
        yield pair


@pytest.fixture(scope="module")
def healed(shared_pair: FaultyPair) -> FaultyPair:
    """Two engines that share, whatever an earlier module has done to them."""
    shared_pair.restart()
    shared_pair.heal()
    return shared_pair


@pytest.fixture
def pair(healed: FaultyPair) -> FaultyPair:
    """Two engines that run; every test leaves their nodes so that they share."""
    healed.restart()
    return healed


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of its own for each test and parameter: no two tests share a prompt."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def prompt(seed: int) -> list[int]:
    """A prompt of the test's own."""
    return make_prompt(seed, 1000)


@pytest.fixture(scope="session")
def shared_trio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One prefill, one decode, one proxy; every test leaves them whole."""
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Trio(Path(folder), tiny_model, tmp_path_factory.mktemp("trio-logs"), seed=1, secret="of the fleet") as trio,
    ):
        yield trio
        trio.check_no_crash()
