"""The processors that this process could use before its engine pinned threads to some of them.

vLLM's plugin imports this module in each of vLLM's processes before anything is pinned.
"""

from __future__ import annotations

import os
from contextlib import suppress

PROCESSORS = frozenset(os.sched_getaffinity(0))
"""Processors that this process may use, as they were when this module was imported."""


def use_processors() -> None:
    """Frees the calling thread from the processors to which the engine has pinned the thread that started it."""
    with suppress(OSError):
        os.sched_setaffinity(0, PROCESSORS)
