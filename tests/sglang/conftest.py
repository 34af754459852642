"""SGLang with lmkv, for all tests of a run; see `make test-sglang`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from lmkv.rpc.messages import by_tokens
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.model import TINY, make_model
from lmkv_client.demo.process import end_processes, free_port, pids_with_environment
from tests.sglang.engine import PAGE_SIZE, SglangProcess, install_shims, linker_flags, storage_flags
from tests.sglang.prompts import STORE_SECONDS
from tests.waiting import wait_until

TEST_TIMEOUT_SECONDS = 600
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives what starts engines its time."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))
            item.add_marker(pytest.mark.engine)


def pytest_sessionstart() -> None:
    """Fails at once, with the fix, instead of in each test. Imports SGLang with its shims, and whatever it warns of."""
    if importlib.util.find_spec("sglang") is None:
        pytest.exit(f"SGLang is not installed beside {sys.executable}: run `make test-sglang`", returncode=2)
    install_shims()
    with warnings.catch_warnings(action="ignore"):
        import sglang.srt.mem_cache.pool_host.mha
        import sglang.srt.mem_cache.pool_host.mla
        import sglang.srt.mem_cache.storage.backend_factory  # noqa: F401


class Fleet:
    """Nodes and engines that share one coordinator. The caller starts engines."""

    def __init__(self, folder: Path, logs: Path, model: Path, coordinator: CoordinatorProcess) -> None:
        """`folder` gets sockets; its path must be short."""
        self.coordinator = coordinator
        self.folder = folder
        self.disk = logs / "disk"
        self._logs = logs
        self._model = model
        self._metrics_ports: dict[str, int] = {}

    def engine(
        self,
        name: str,
        *,
        instance_id: str = "",
        model: Path | None = None,
        layout: str = "page_first_direct",
        rank_count: int = 1,
        settings: dict[str, str] | None = None,
        links: bool = False,
        flags: dict[str, str] | None = None,
    ) -> SglangProcess:
        """An engine, not started, whose node is the instance `instance_id`, by default `name`.

        `links`: it has the linker, and otherwise HiCache with the storage backend.
        """
        instance_id = instance_id or name
        port = self._metrics_ports.setdefault(instance_id, free_port())
        environment = {
            "LMKV_INSTANCE_ID": instance_id,
            "LMKV_RUNTIME_DIR": str(self.folder),
            "LMKV_COORDINATOR_ADDRESS": self.coordinator.address,
            "LMKV_METRICS_PORT": str(port),
        }
        return SglangProcess(
            name,
            model or self._model,
            self._logs,
            flags=(linker_flags() if links else storage_flags(layout)) | (flags or {}),
            environment=environment | (settings or {}),
            rank_count=rank_count,
        )

    def metrics(self, instance_id: str) -> dict[str, float]:
        """What a node counts, by name, and by name and tier."""
        return Endpoint(instance_id, self._metrics_ports[instance_id], "").metrics()

    def found_chunks(self, instance_id: str, tier: str) -> float:
        """Chunks that lookups have found so far in one tier of a node; of all ranks together."""
        return self.metrics(instance_id).get(f'lmkv_node_lookup_found_chunks_total{{tier="{tier}"}}', 0.0)

    def chunk_count(self, instance_id: str) -> float:
        """Chunks that are in a node's pool; of all ranks together."""
        return self.metrics(instance_id).get("lmkv_node_chunks", 0.0)

    def wait_stored(self, prompt: Sequence[int], instance_id: str, *, cache_salt: str = "") -> None:
        """Waits until the coordinator knows all pages of a prompt at an instance: SGLang stores after it answered."""
        count = len(prompt) // PAGE_SIZE * PAGE_SIZE
        if not cache_salt:
            self.coordinator.wait_for_holder(prompt, instance_id, count, STORE_SECONDS)
            return
        wait_until(lambda: self.holders(prompt, cache_salt).get(instance_id, 0) >= count, "it is stored", STORE_SECONDS)

    def holders(self, prompt: Sequence[int], cache_salt: str) -> dict[str, int]:
        """Number of tokens of a prompt with a cache salt that each instance holds."""
        request = cache_service_pb2.LookupRequest(prompt=by_tokens(prompt, cache_salt=cache_salt))
        with grpc.insecure_channel(self.coordinator.address) as channel:
            response = cache_service_pb2_grpc.CacheServiceStub(channel).Lookup(request, timeout=60, wait_for_ready=True)
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}

    def node_pids(self, instance_id: str = "") -> list[int]:
        """Running nodes: of one instance, or all."""
        variables = {"LMKV_RUNTIME_DIR": str(self.folder)}
        return pids_with_environment(variables | ({"LMKV_INSTANCE_ID": instance_id} if instance_id else {}), "node")

    def kill_node(self, instance_id: str) -> None:
        for pid in self.node_pids(instance_id):
            os.kill(pid, signal.SIGKILL)

    def end_nodes(self) -> None:
        end_processes(self.node_pids())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fastest model, in a folder of its own."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangProcess]:
    """An engine without lmkv, of the same model. It leaves the processor to others while it has no request."""
    with SglangProcess("alone", model, tmp_path_factory.mktemp("alone"), flags={"--sleep-on-idle": ""}) as engine:
        yield engine


@contextmanager
def open_fleet(model: Path, logs: Path) -> Iterator[Fleet]:
    """A coordinator, and a place for nodes; none is left afterwards.

    Engines whose prompts are looked up by tokens must all have one model: no other may be in the fleet.
    """
    folder = Path(tempfile.mkdtemp(prefix="lmkv-", dir="/tmp"))
    with CoordinatorProcess(logs) as coordinator:
        fleet = Fleet(folder, logs, model, coordinator)
        try:
            yield fleet
        finally:
            fleet.end_nodes()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet of all tests with one rank."""
    with open_fleet(model, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
