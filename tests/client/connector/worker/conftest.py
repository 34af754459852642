"""Pools and worker sides for the tests of the worker side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmkv_client.connector.identity import head_shares
from lmkv_client.connector.worker import side as worker_module
from lmkv_client.connector.worker.side import WorkerSide
from tests.client.connector.worker.parts import GROUP, SPEC, Caches, ServedPool
from tests.waiting import WAIT_SECONDS


@pytest.fixture(autouse=True)
def steps_wait_for_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronous loads and stores of the first step need the pool, however busy the host is."""
    monkeypatch.setattr(worker_module, "MAP_WAIT_SECONDS", WAIT_SECONDS)


@pytest.fixture
def serve(runtime_dir: Path) -> Iterator[Callable[..., ServedPool]]:
    """Starts pools, each of a higher epoch at a socket of its own."""
    served: list[ServedPool] = []

    def start(**options: int) -> ServedPool:
        number = len(served) + 1
        served.append(ServedPool(runtime_dir / f"{number}.sock", number, **options))
        return served[-1]

    yield start
    for one in served:
        one.close()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., WorkerSide]]:
    """Makes worker sides, and closes them."""
    made: list[WorkerSide] = []

    def make(caches: Caches, rank: int = 0, ranks: int = 1, threads: int = 1) -> WorkerSide:
        made.append(WorkerSide(SPEC, head_shares(SPEC, rank, ranks), groups=[GROUP], rank=rank, threads=threads))
        made[-1].register(caches)
        return made[-1]

    yield make
    for one in made:
        one.close()
