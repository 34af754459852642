"""A copy of the working tree in which mutants are applied and tested: the tree itself is never changed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant, caught_by

SOURCES = (".", "server", "client", "kernels", "tests/mutants/imports")
"""Folders that Python imports from."""
PACKAGES = ("lmkv", "lmkv_server", "lmkv_client", "lmkv_kernels", "lmkv_kernels._host")
TEST_SECONDS = 60
"""Timeout of one test, after which it counts as failed: less than the default, since a mutant may well hang."""
PYTEST_FAILED = 1
"""Exit code of pytest if tests failed; others are errors of usage or of imports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run of tests ended."""

    test: str
    """The first test that failed; empty if none did."""
    problem: str = ""
    """Why the run says nothing."""
    output: str = ""


class TreeCopy:
    """A copy in a folder, which has to be empty."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(folder / source) for source in SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",  # mutants may differ from each other in neither size nor time
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
        }

    def make(self) -> None:
        """Copies all files that git does not ignore, and the built modules. Raises `RuntimeError` if Python would
        import others."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (source := ROOT / name).is_file():
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self._folder / name)
        built = find_spec("lmkv_kernels._host")
        assert built
        assert built.origin
        for module in Path(built.origin).parent.glob("*.so"):
            shutil.copy2(module, self._folder / "kernels/lmkv_kernels" / module.name)
        code = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
        shown = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self._folder,
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        others = [path for path in shown.stdout.split() if not Path(path).is_relative_to(self._folder)]
        if others:
            raise RuntimeError(f"the copy is not what Python imports: {', '.join(others)}")

    def apply(self, mutant: Mutant, *, reverse: bool = False) -> bool:
        """Applies a mutant to the copy, or removes it; whether that was possible."""
        command = ["git", "apply", *(["--reverse"] if reverse else []), str(mutant.patch)]
        return not subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, check=False
        ).returncode

    def test(self, tests: Sequence[str], timeout_seconds: float) -> Outcome:
        """Runs test files in the copy until one test fails."""
        options = ("-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-o", f"timeout={TEST_SECONDS}")
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return Outcome(test="", problem=f"no test failed within {timeout_seconds:g} s")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.communicate()
        test = caught_by(output)
        if run.returncode not in (0, PYTEST_FAILED) or (run.returncode and not test):
            return Outcome(test="", problem=f"pytest ended with {run.returncode}", output=output)
        return Outcome(test=test, output=output)
