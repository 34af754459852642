"""Runs tests against mutants in forked processes: what takes most of a short run, imports, happens once.

A child imports the mutated source in place of the module's file; the working tree is not changed.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

import hypothesis
import pytest

from tests.mutants.generated.mutation import GeneratedMutant, file_of

OWN = ("__main__", "benchmarks", "conftest", "lmkv", "lmkv_client", "lmkv_kernels", "lmkv_server", "tests")
"""Packages that each child imports itself: they import the mutated module."""
MEMORY_BYTES = 32 << 30
"""Limit of a child's address space."""
OPTIONS = (
    *("-q", "-x", "--tb=short", "--noconftest", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
"""Without conftest.py, which starts a process for tests of servers. Plug-ins of pytest are imported before it starts,
hence without assertions of pytest's form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run of tests ended."""

    caught_by: str
    """The first test that failed, or another reason why the run failed; empty if all tests passed."""
    seconds: float
    output: str
    imported: Sequence[str] = ()
    """Modules of other packages."""


def preload(modules: Sequence[str]) -> None:
    """Imports modules of other packages before children are forked."""
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # a part of a package that only the package itself can import
                importlib.import_module(name)


def run_all(
    mutants: Sequence[GeneratedMutant], tests: Sequence[str], timeout_seconds: float, jobs: int
) -> Iterator[tuple[GeneratedMutant, RunResult]]:
    """Runs tests against each mutant, `jobs` at a time; in the order in which they end."""
    waiting = list(reversed(mutants))
    running: dict[int, tuple[GeneratedMutant, _Child]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop()
                child = _Child(tests, timeout_seconds, mutant)
                running[child.pipe] = mutant, child
            first = min(child.deadline for _, child in running.values())
            ready, _, _ = select.select(list(running), [], [], max(first - time.monotonic(), 0))
            now = time.monotonic()
            for pipe in [pipe for pipe, (_, child) in running.items() if pipe in ready or child.deadline <= now]:
                mutant, child = running.pop(pipe)
                yield mutant, child.result()
    finally:
        for _, child in running.values():
            child.kill()


def run(tests: Sequence[str], timeout_seconds: float) -> RunResult:
    """Runs tests without a mutant."""
    return _Child(tests, timeout_seconds).result()


class _Child:
    """A forked process that runs pytest. `pipe` is readable once it has ended."""

    def __init__(self, tests: Sequence[str], timeout_seconds: float, mutant: GeneratedMutant | None = None) -> None:
        self._began = time.monotonic()
        self.deadline = self._began + timeout_seconds
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - `kill` closes it
        self._folder = tempfile.TemporaryDirectory(prefix="lmkv-mutation-")
        self.pipe, end = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                os.setsid()
                os.close(self.pipe)
                os.dup2(self._output.fileno(), 1)
                os.dup2(self._output.fileno(), 2)
                _run_pytest(tests, mutant, Path(self._folder.name), end)
                status = 0
            finally:
                os._exit(status)
        os.close(end)

    def result(self) -> RunResult:
        """Waits until the process has ended, or kills it at its deadline."""
        sent = b""
        while select.select([self.pipe], [], [], max(self.deadline - time.monotonic(), 0))[0]:
            if not (part := os.read(self.pipe, 1 << 20)):
                break
            sent += part
        else:
            sent = json.dumps({"caught_by": "timeout"}).encode()
        seconds = time.monotonic() - self._began
        output = self.kill()
        read: dict[str, Any] = json.loads(sent) if sent else {"caught_by": "the process ended"}
        return RunResult(**{"seconds": seconds, "output": output, "imported": (), **read})

    def kill(self) -> str:
        """Ends the process and all that it started; returns the output."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.pipe)
        self._folder.cleanup()
        with self._output:
            self._output.seek(0)
            return self._output.read().decode(errors="replace")


def _run_pytest(tests: Sequence[str], mutant: GeneratedMutant | None, folder: Path, pipe: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    if mutant:
        assert mutant.module not in sys.modules
        sys.meta_path.insert(0, _MutantFinder(mutant))
    recorder = _Recorder()
    code = pytest.main([*OPTIONS, f"--basetemp={folder / 'pytest'}", *tests], plugins=[recorder])
    failed = recorder.failed
    if not failed and code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # failed without a test: the
        failed = f"pytest ended with {int(code)}"  # fleet of another run left shared memory behind
    imported = sorted(name for name in sys.modules if name.partition(".")[0] not in OWN) if not mutant else []
    sys.stdout.flush()
    with os.fdopen(pipe, "wb") as sender:
        sender.write(json.dumps({"caught_by": failed, "imported": imported}).encode())


class _Recorder:
    """Plug-in of pytest: remembers the first failure. Hypothesis runs last, and neither shrinks nor stores examples."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_sessionstart(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        checks = [hypothesis.HealthCheck.too_slow]
        hypothesis.settings.register_profile(
            "mutation", deadline=None, suppress_health_check=checks, phases=phases, database=None, derandomize=True
        )
        hypothesis.settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: hypothesis.is_hypothesis_test(getattr(item, "obj", None)))  # the quick ones first

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"import of {report.nodeid}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


class _MutantFinder(MetaPathFinder):
    """Finds the mutated module in place of its file."""

    def __init__(self, mutant: GeneratedMutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        path = str(file_of(fullname))
        return spec_from_file_location(fullname, path, loader=_MutantLoader(fullname, path, self._mutant.source))


class _MutantLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)
