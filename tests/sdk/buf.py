"""buf, as `make setup` installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 50.0


def find_buf() -> str:
    """Where buf is."""
    own = ROOT / ".buf/node_modules/.bin/buf"
    found = str(own) if own.exists() else shutil.which("buf")
    if found is None:
        pytest.fail("buf is missing: install npm and run `make setup`, or put buf on the PATH")
    return found


def buf(*arguments: str | Path) -> None:
    """Runs buf in the repository. Fails the test with what it says if it fails."""
    command = [find_buf(), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
