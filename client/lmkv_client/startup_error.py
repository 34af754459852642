"""Prints a configuration error as the last line of an engine, below the tracebacks of its other processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from types import TracebackType

from lmkv.errors import LmkvError

VARIABLE = "_LMKV_STARTUP_ERROR_FILE"
"""Names the file in which the processes of an engine record the error. Its prefix is not that of lmkv's keys."""
RAY_WORKER = "default_worker.py"
"""The script that Ray runs in its workers."""
HELPER_SECONDS = 5.0
"""Deadline for the resource tracker of `multiprocessing` to exit."""


def print_at_exit() -> None:
    """Makes the first process of an engine print the recorded error if it exits by an exception. Idempotent.

    A program that has loaded vLLM's plugins may start engines as programs of their own: each of these has its file,
    though it has inherited the name of another one.
    """
    name = f"lmkv-startup-error-{os.getpid()}-"
    inherited = os.environ.get(VARIABLE, "")
    if Path(inherited).name.startswith(name) or (inherited and _is_part_of_engine()):
        return
    path = Path(tempfile.gettempdir(), f"{name}{secrets.token_hex(8)}")
    os.environ[VARIABLE] = str(path)
    atexit.register(_print, path, os.getpid())


def _is_part_of_engine() -> bool:
    """Whether this process is one of vLLM's workers, which `multiprocessing` or Ray start."""
    return multiprocessing.parent_process() is not None or Path(sys.argv[0]).name == RAY_WORKER


def record(error: LmkvError) -> None:
    """Records the first error of an engine. If nothing catches it in this process, it has no traceback there."""
    _hide_traceback(error)
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):  # another process of the engine has recorded one
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(" ".join(str(error).split()))


def _hide_traceback(error: LmkvError) -> None:
    shown_before = sys.excepthook

    def show(kind: type[BaseException], raised: BaseException, traceback: TracebackType | None) -> None:
        if raised is not error:
            shown_before(kind, raised, traceback)

    sys.excepthook = show


def _print(path: Path, pid: int) -> None:
    if os.getpid() != pid:  # a forked child
        return
    with suppress(OSError):
        text = path.read_text()
        path.unlink()
        if hasattr(sys, "last_value"):  # else the program continued without this engine
            _end_helpers()
            sys.stderr.write(f"lmkv: error: {text}\n")
            sys.stderr.flush()


def _end_helpers() -> None:
    """Ends the helper processes of `multiprocessing` before Python does: they print warnings."""
    clean_up = getattr(util, "_exit_function", None)
    stop = getattr(getattr(resource_tracker, "_resource_tracker", None), "_stop", None)
    if clean_up is None or stop is None:
        return
    clean_up()
    waiting = threading.Thread(target=stop, daemon=True)  # returns when the last process with the tracker's pipe exits
    waiting.start()
    waiting.join(HELPER_SECONDS)
