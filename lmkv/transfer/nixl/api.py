"""Import, errors and descriptors of NIXL."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import ConfigError
from lmkv.transfer.channel import Copy

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
"""Packages that contain NIXL; the first installed one is used."""
ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "fatal",  # NIXL reports errors itself
    "UCX_LOG_FILE": "stderr",
}
"""Defaults of environment variables that NIXL and UCX read when they are loaded."""
_HOOKS = "UCX_MEM_MMAP_HOOK_MODE"
BATCH_BYTES = 64 << 20
"""Maximum bytes per post: on one host the post itself copies, which delays polling."""

Descriptors = NDArray[np.uint64]
"""Rows of address, size in bytes and device; the device is 0 for host memory."""


def load() -> Any:
    """Imports NIXL's Python API and fixes its logging. Raises `ConfigError` if it is not installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raise_exceptions = logging.raiseExceptions
    for package in PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise ConfigError(
                f"transfer_channel: {package} cannot be loaded: {error}", key="transfer_channel"
            ) from None
        # On import NIXL logs to standard output, and sets `logging.raiseExceptions` for the process.
        logging.raiseExceptions = raise_exceptions
        nixl_logger = logging.getLogger("nixl")
        nixl_logger.handlers.clear()
        nixl_logger.propagate = True
        nixl_logger.setLevel(logging.WARNING)
        return api
    raise ConfigError(
        "transfer_channel: 'nixl' needs NIXL, which is not installed; "
        "pip install '.[nixl]' in a clone of lmkv, or set enable_p2p to false",
        key="transfer_channel",
    )


@contextmanager
def without_mmap_hooks() -> Iterator[None]:
    """Makes the UCX that is loaded meanwhile install no hooks in `mmap`: memory is registered explicitly.

    While UCX installs them, which takes 0.4 s, every thread that calls `mmap` waits, by the wall clock: where that is
    set back by an hour then, the process stands still for one. A UCX that is loaded later may choose: without hooks,
    UCXX ends with a segmentation fault when a read is interrupted.
    """
    is_chosen = _HOOKS in os.environ
    os.environ.setdefault(_HOOKS, "none")
    try:
        yield
    finally:
        if not is_chosen:
            os.environ.pop(_HOOKS, None)


def errors(api: Any) -> tuple[type[Exception], ...]:
    """All exceptions that NIXL raises; they have no common base."""
    own = (value for name, value in vars(api.nixlBind).items() if name.endswith("Error") and isinstance(value, type))
    return (RuntimeError, ValueError, *own)


def descriptor_batches(copies: Sequence[Copy]) -> Iterator[tuple[Descriptors, Descriptors]]:
    """Local and remote descriptors in batches of at most `BATCH_BYTES`; adjacent copies are merged."""
    rows: list[list[int]] = []  # local address, remote address, size
    room = BATCH_BYTES
    for copy in copies:
        done = 0
        while done < copy.size_bytes:
            size = min(copy.size_bytes - done, room)
            local, remote = copy.local_address + done, copy.remote_address + done
            if rows and rows[-1][0] + rows[-1][2] == local and rows[-1][1] + rows[-1][2] == remote:
                rows[-1][2] += size
            else:
                rows.append([local, remote, size])
            done += size
            room -= size
            if not room:
                yield _descriptors(rows)
                rows, room = [], BATCH_BYTES
    if rows:
        yield _descriptors(rows)


def _descriptors(rows: list[list[int]]) -> tuple[Descriptors, Descriptors]:
    table = np.array(rows, np.uint64)
    local, remote = np.zeros_like(table), np.zeros_like(table)
    local[:, 0], remote[:, 0] = table[:, 0], table[:, 1]
    local[:, 1] = remote[:, 1] = table[:, 2]
    return local, remote
