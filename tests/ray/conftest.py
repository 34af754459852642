"""A Ray cluster of two machines, both on this host, for all tests of a run; see `make test-ray`."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.model import TINY, make_model
from tests.engines.llm import LlmProcess, Nursery
from tests.ray.hosts import Hosts
from tests.ray.page import Page

TEST_TIMEOUT_SECONDS = 780
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives what starts engines under Ray its time, and says what is missing where there is no Ray."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))
            item.add_marker(pytest.mark.engine)


def pytest_sessionstart() -> None:
    """Fails at once, with the fix, instead of in each test."""
    if importlib.util.find_spec("ray") is None:
        pytest.exit(f"Ray is not installed beside {sys.executable}: run `make test-ray`", returncode=2)


@pytest.fixture(scope="session")
def page() -> Page:
    """The files of docs/guides/ray-serve.md."""
    return Page(HERE.parents[1] / "docs" / "guides" / "ray-serve.md")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fastest model, in a folder of its own."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def alone(nursery: Nursery, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmProcess]:
    """An engine without lmkv and without Ray, of the same model."""
    log_file = tmp_path_factory.mktemp("alone") / "alone.log"
    engine = LlmProcess(model, nursery, name="alone", log_file=log_file, environment={}, transfer_config=None)
    engine.start()
    engine.wait_ready()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One for both machines."""
    with CoordinatorProcess(tmp_path_factory.mktemp("coordinator")) as coordinator:
        yield coordinator


@pytest.fixture(scope="session")
def hosts(coordinator: CoordinatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """`host-1`, the head, and `host-2`: each has room for one engine, and a name for its node in its environment."""
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Hosts(Path(folder), tmp_path_factory.mktemp("hosts"), coordinator) as hosts,
    ):
        yield hosts
