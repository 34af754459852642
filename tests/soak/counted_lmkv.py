"""Runs the command `lmkv` and writes the number of asyncio tasks to a file on each SIGUSR1: no metric has it.

Usage: `python -P counted_lmkv.py FILE ARGUMENTS...`
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from lmkv.cli import main


def write_task_counts(file: Path) -> None:
    """From now on, each SIGUSR1 writes the number of tasks, if an event loop runs in the main thread."""

    def write(*_: object) -> None:
        with suppress(RuntimeError):  # no event loop is running
            temporary = file.with_suffix(".new")
            temporary.write_text(str(len(asyncio.all_tasks())))
            temporary.replace(file)

    signal.signal(signal.SIGUSR1, write)


if __name__ == "__main__":
    write_task_counts(Path(sys.argv.pop(1)))
    sys.exit(main())
