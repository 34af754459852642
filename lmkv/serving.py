"""How a server process of lmkv runs: on the fastest loop there is, until it is told to end or cannot go on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, where there is uvloop: it takes a third off what a unary call costs."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def stop_on_signals() -> asyncio.Event:
    """Set on SIGTERM or SIGINT from now on. To be had before the start: who is told to end while it starts, ends."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them ends, and cancels the others; raises what that one raised."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
