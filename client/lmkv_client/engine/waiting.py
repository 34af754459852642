"""Blocking waits for futures that end at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def await_result(future: Future[T], deadline: float, expire: Callable[[], None]) -> T:
    """The result of a future. At its deadline `expire` ends it with what there is."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        expire()
        return future.result()
