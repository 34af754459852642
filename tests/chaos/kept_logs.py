"""Keeps the logs of a failed run in `build/failures`, where pytest does not remove them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FAILURES = Path(__file__).parents[2] / "build" / "failures"


@contextmanager
def kept_logs(
    name: str, run: str, logs: Path, capsys: pytest.CaptureFixture[str], failures: Path = FAILURES
) -> Iterator[None]:
    """Copies the folder `logs` if the body fails, and prints `run`, which repeats it, and where the copy is."""
    try:
        yield
    except BaseException as error:  # those of `pytest.fail` are no `Exception`
        kept = failures / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
        shutil.copytree(logs, kept, symlinks=True, dirs_exist_ok=True)
        text = f"{run} failed; its logs are in {kept}"
        error.add_note(text)
        with capsys.disabled():
            print(f"\n{text}", flush=True)
        raise
