"""buf, as `make setup` installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 120.0  # a busy host may stand still for long


def find_buf() -> str:
    """Where buf is: the program itself, since npm's script of that name starts Node first."""
    own = [str(program) for program in ROOT.glob(".buf/node_modules/@bufbuild/buf-*/bin/buf")]
    found = os.environ.get("BUF") or next(iter(own), None) or shutil.which("buf")
    if found is None:
        pytest.fail("buf is missing: install npm and run `make setup`, or put buf on the PATH")
    return found


def buf(*arguments: str | Path, plugins: Path | None = None) -> None:
    """Runs buf in the repository, with a folder of plugins in front. Fails the test with what it says if it fails."""
    command = [find_buf(), *map(str, arguments)]
    path = os.pathsep.join([*([str(plugins)] if plugins else []), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
