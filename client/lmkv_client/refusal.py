"""Repeats a refused configuration as the last line that an engine prints, below the tracebacks of its processes."""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path

from lmkv.errors import LmkvError

VARIABLE = "_LMKV_REFUSAL_FILE"
"""Where the processes of an engine leave the refusal for the first of them. It begins like no key of lmkv."""
HELPER_SECONDS = 5.0
"""Most time that the resource tracker of `multiprocessing` gets to end."""


def repeat_at_exit() -> None:
    """Has the first process of an engine print what `note` keeps, when it ends by an exception. Idempotent."""
    if VARIABLE in os.environ:
        return
    path = Path(tempfile.gettempdir(), f"lmkv-refusal-{os.getpid()}-{secrets.token_hex(8)}")
    os.environ[VARIABLE] = str(path)
    atexit.register(_repeat, path, os.getpid())


def note(error: LmkvError) -> None:
    """Keeps the first refusal of an engine."""
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):  # another process of the engine was first
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(" ".join(str(error).split()))


def _repeat(path: Path, pid: int) -> None:
    if os.getpid() != pid:  # a child that was forked
        return
    with suppress(OSError):
        text = path.read_text()
        path.unlink()
        if hasattr(sys, "last_value"):  # else the program went on without this engine
            _end_helpers()
            sys.stderr.write(f"lmkv: error: {text}\n")
            sys.stderr.flush()


def _end_helpers() -> None:
    """Ends what Python's `multiprocessing` has started, a little earlier than Python: it prints warnings of its own."""
    clean_up = getattr(util, "_exit_function", None)
    stop = getattr(getattr(resource_tracker, "_resource_tracker", None), "_stop", None)
    if clean_up is None or stop is None:
        return
    clean_up()
    waiting = threading.Thread(target=stop, daemon=True)  # ends with the last process that has the tracker's pipe
    waiting.start()
    waiting.join(HELPER_SECONDS)
