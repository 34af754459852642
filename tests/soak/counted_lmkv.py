"""Runs the command `lmkv` and writes the number of asyncio tasks to a file on each SIGUSR1: no metric has it.

Coordinators keep less than they do otherwise, so that what they keep is full, and made of the load alone, in minutes.

Usage: `python -P counted_lmkv.py FILE ARGUMENTS...`
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from lmkv.cli import main
from lmkv_server.coordinator.services import layout_watch

KEPT_HISTORY_BYTES = 1 << 20


def write_task_counts(file: Path) -> None:
    """From now on, each SIGUSR1 writes the number of tasks, if an event loop runs in the main thread."""

    def write(*_: object) -> None:
        with suppress(RuntimeError):  # no event loop is running
            temporary = file.with_suffix(".new")
            temporary.write_text(str(len(asyncio.all_tasks())))
            temporary.replace(file)

    signal.signal(signal.SIGUSR1, write)


def keep_less() -> None:
    """From now on, a coordinator that starts remembers fewer changes for watches."""
    layout_watch.HISTORY_BYTES = KEPT_HISTORY_BYTES


if __name__ == "__main__":
    keep_less()
    write_task_counts(Path(sys.argv.pop(1)))
    sys.exit(main())
