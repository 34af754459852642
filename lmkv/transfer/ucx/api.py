"""Import, workers and requests of ucxx. For the UCX channel only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from lmkv.errors import ConfigError

ENVIRONMENT = {
    "UCX_LOG_LEVEL": "fatal",  # lmkv reports errors itself
    "UCX_LOG_FILE": "stderr",
}
"""Defaults of environment variables that UCX reads when it is loaded."""
TICK_MILLISECONDS = 10
"""Time that a thread waits for the network between two checks for cancellation."""
CLOSE_NANOSECONDS = 100_000_000
CLOSE_SECONDS = 2.0


def load() -> Any:
    """Imports the core of ucxx. Raises `ConfigError` if it is not installed or cannot be loaded."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ucxx._lib.libucxx")
    except ModuleNotFoundError:
        raise ConfigError(
            "transfer_channel: 'ucx' needs ucxx, which is not installed; pip install '.[ucx]' in a clone of lmkv",
            key="transfer_channel",
        ) from None
    except ImportError as error:
        raise ConfigError(f"transfer_channel: ucxx cannot be loaded: {error}", key="transfer_channel") from None


def make_worker(api: Any) -> Any:
    """Creates a worker in a context of its own, because contexts are not thread-safe. One thread at a time may use it.

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
    """A UCX request and its memory, to which ucxx keeps no reference."""

    def __init__(self, begin: Callable[..., Any], memory: Any, *more: Any) -> None:
        """`begin` is called with the memory, any buffer, as an array of ucxx."""
        self._array = import_module("ucxx._lib.arr").Array(memory)
        self._request = begin(self._array, *more)

    @property
    def completed(self) -> bool:
        """Whether it has ended, successfully or not."""
        return bool(self._request.completed)

    def check_error(self) -> None:
        """Raises the UCX error of a failed request."""
        self._request.check_error()


def close(worker: Any, endpoints: Sequence[Any], pending: Sequence[UcxRequest]) -> None:
    """Closes endpoints and waits until all requests have ended: then no more bytes arrive."""
    for endpoint in endpoints:
        with suppress(Exception):  # the peer may be lost
            if endpoint.alive:
                endpoint.close_blocking(CLOSE_NANOSECONDS, 1)
    deadline = time.monotonic() + CLOSE_SECONDS
    while any(not each.completed for each in pending) and time.monotonic() < deadline:
        worker.cancel_inflight_requests(CLOSE_NANOSECONDS, 1)
        worker.progress()
