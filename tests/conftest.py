"""What all tests share: free ports, a short folder for sockets, engines last, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from lmkv_client.demo.process import free_port as find_free_port
from tests.support.shared_memory import RUN_VARIABLE, SharedMemoryWatch, processes_with

pytest_plugins = ("tests.engines.llm", "tests.support.forked_commands")  # pytest takes this here only

ENGINES = "tests/engines/"
FORKED = tuple(
    f"{ENGINES}test_{name}.py"
    for name in (
        "architectures",
        "features",
        "hybrid",
        "isolation",
        "outputs",
        "partial_chunks",
        "requests",
        "specs",
        "tensor_parallel",
        "token_major",
    )
)
"""Of these those whose engines the nursery forks: they share nothing with the others, which start servers."""
CORE_ENGINES = tuple(
    f"{ENGINES}test_{name}.py"
    for name in (
        "across_engines",
        "architectures",
        "demo",
        "disk",
        "faults",
        "partial_chunks",
        "pd",
        "warm_restart",
    )
)
"""Of all tests with engines those that `make test` runs: sharing, restarts, P/D, tiers, kills, and hybrid models."""
OUTER = (
    "tests/benchmarks/",
    "tests/chaos/",
    "tests/client/connector/worker/test_device_buffer.py",
    "tests/client/test_plugin.py",
    "tests/client/transformers/",
    "tests/cluster/",
    "tests/fuzz/",
    "tests/helm/",
    "tests/histories/",
    "tests/lmkv/transfer/test_contract.py",
    "tests/models/",
    "tests/mutants/",
    "tests/promises/test_packages.py",
    "tests/promises/test_recipes.py",
    "tests/promises/test_site.py",
    "tests/promises/test_style.py",
    "tests/sdk/",
    "tests/server/coordinator/http/page/",
    "tests/server/proxy/test_page.py",
    "tests/soak/",
)
"""Tests without engines that `make test-all` runs: charts, wheels, browsers, SDKs, linters, all channels, other
versions of vLLM."""
LONGEST = "tests/server/test_interruptions.py"
"""Runs first: at the end, the other processes would wait for it."""
LEFT_BEHIND_TIMEOUT_SECONDS = 60.0
SHARED_MEMORY_WATCH = pytest.StashKey[SharedMemoryWatch]()
SOCKETS = pytest.StashKey[str]()


# A busy host is not a failure: Hypothesis's own deadline is 200 ms for each example.
hypothesis.settings.register_profile("lmkv", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("lmkv")

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before the first import of gRPC: broken connections are expected
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the first import of PyTorch: idle threads of it spin


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--suite`."""
    parser.addoption(
        "--suite",
        choices=("core", "rest", "all"),
        default="all",
        help="core: what `make test` runs; rest: the others. Files and folders that are named run whole",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Lets Ctrl-C and SIGHUP work in what the tests start: a run in the background, or by `nohup`, ignores them."""
    if config.args_source is pytest.Config.ArgsSource.ARGS and not hasattr(config, "workerinput"):
        config.option.suite = "all"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # pytest still survives it; new programs begin with the default


def pytest_sessionstart(session: pytest.Session) -> None:
    """Marks the processes that this run starts, among them those of pytest-xdist, and watches their shared memory.

    The sockets of vLLM's processes, which those that are killed leave behind, get a folder that goes with the run.
    """
    outer = os.environ.get(RUN_VARIABLE)
    os.environ[RUN_VARIABLE] = f"{outer}/{uuid.uuid4().hex}" if outer else uuid.uuid4().hex
    if not hasattr(session.config, "workerinput"):
        session.config.stash[SHARED_MEMORY_WATCH] = SharedMemoryWatch(os.environ[RUN_VARIABLE])
        session.config.stash[SOCKETS] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-", dir="/tmp")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if it leaves shared memory of lmkv or of engines behind: once, after the last of its processes."""
    if hasattr(session.config, "workerinput"):
        return
    shutil.rmtree(session.config.stash[SOCKETS], ignore_errors=True)
    if left := session.config.stash[SHARED_MEMORY_WATCH].close():
        session.config.get_terminal_writer().line(f"\ntests left shared memory behind: {left}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Has one process run all engines that are servers, one all that are forked, and each file as a whole.

    Engines compete for the processors; so does every further import of vLLM.
    """

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(ENGINES):
                return "forked engines" if file in FORKED else "engines"
            return file

    return ByFile(config, log)


def is_core(path: str) -> bool:
    """Whether `make test` runs the tests of a file; the path is relative to the repository."""
    return path in CORE_ENGINES if path.startswith(ENGINES) else not path.startswith(OUTER)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the files of the other suite unread: each process of a run would import and rewrite all of them."""
    suite = config.getoption("suite")
    path = collection_path.relative_to(config.rootpath).as_posix()
    if suite == "all" or not path.startswith("tests/"):
        return None
    if collection_path.is_dir():
        return True if suite == "core" and f"{path}/".startswith(OUTER) else None
    return True if collection_path.name.startswith("test_") and is_core(path) != (suite == "core") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Runs what needs no engine first: it is fast, and finds most mistakes.

    Of several processes, one begins with the engines that are servers, and another takes the forked ones before what
    follows by name: at the end, the others would wait for it.
    """
    is_shared = hasattr(config, "workerinput")

    def place(item: pytest.Item) -> int:
        if not item.nodeid.startswith(ENGINES):
            return 0 if item.nodeid.startswith(LONGEST) else 1
        if not is_shared:
            return 2
        return 1 if item.nodeid.startswith(FORKED) else 0

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps lone surrogates out of what was captured: pytest-xdist cannot send them, and the whole run would end."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Answers a TCP port on loopback that is free, another one at each call."""
    given: set[int] = set()

    def find() -> int:
        while (port := find_free_port()) in given:
            pass
        given.add(port)
        return port

    return find


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets in it, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="lmkv-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runtime_dir(short_folder: Path) -> Path:
    """A fresh `runtime_dir` for nodes, with a path short enough for sockets in it."""
    return short_folder


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the run if a process that a test started is still there at its end."""
    yield
    mark = os.environ[RUN_VARIABLE]
    deadline = time.monotonic() + LEFT_BEHIND_TIMEOUT_SECONDS
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"tests left processes behind: {left}"
