"""What lmkv needs of ucxx: the import, workers, requests. For the UCX channel only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from lmkv.errors import ConfigError

ENVIRONMENT = {
    "UCX_LOG_LEVEL": "fatal",  # lmkv tells once more what matters
    "UCX_LOG_FILE": "stderr",
}
"""Defaults for variables that UCX reads when it is loaded."""
TICK_MILLISECONDS = 10
"""How long a thread waits for the network before it looks whether it should go on."""
CLOSE_NANOSECONDS = 100_000_000
CLOSE_SECONDS = 2.0


def load() -> Any:
    """ucxx's core. Raises `ConfigError` if it is not installed, or does not load."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ucxx._lib.libucxx")
    except ModuleNotFoundError:
        raise ConfigError(
            "transfer_channel: 'ucx' needs ucxx, which is not installed; pip install 'lmkv[ucx]'",
            key="transfer_channel",
        ) from None
    except ImportError as error:
        raise ConfigError(f"transfer_channel: ucxx cannot be loaded: {error}", key="transfer_channel") from None


def make_worker(api: Any) -> Any:
    """A worker that one thread at a time drives, in a context of its own: contexts are not safe for several threads.

    Raises `ConfigError` if UCX does not start.
    """
    try:
        context = api.UCXContext(feature_flags=(api.Feature.TAG, api.Feature.STREAM, api.Feature.WAKEUP))
    except api.UCXError as error:
        raise ConfigError(
            f"transfer_channel: UCX did not start: {error}; UCX_TLS, if set, must name tcp", key="transfer_channel"
        ) from None
    worker = api.UCXWorker(context)
    worker.init_blocking_progress_mode()
    return worker


class UcxRequest:
    """A request of UCX, and the memory that it works on: ucxx itself keeps no hold of that."""

    def __init__(self, begin: Callable[..., Any], memory: Any, *more: Any) -> None:
        """`begin` gets the memory, any buffer, as ucxx takes it."""
        self._array = import_module("ucxx._lib.arr").Array(memory)
        self._request = begin(self._array, *more)

    @property
    def completed(self) -> bool:
        """Whether it has ended, in whatever way."""
        return bool(self._request.completed)

    def check_error(self) -> None:
        """Raises an error of UCX if it failed."""
        self._request.check_error()


def close(worker: Any, endpoints: Sequence[Any], pending: Sequence[UcxRequest]) -> None:
    """Closes endpoints, and returns once nothing is pending at them any more: then nothing lands."""
    for endpoint in endpoints:
        with suppress(Exception):  # of a peer that is gone
            if endpoint.alive:
                endpoint.close_blocking(CLOSE_NANOSECONDS, 1)
    deadline = time.monotonic() + CLOSE_SECONDS
    while any(not each.completed for each in pending) and time.monotonic() < deadline:
        worker.cancel_inflight_requests(CLOSE_NANOSECONDS, 1)
        worker.progress()
