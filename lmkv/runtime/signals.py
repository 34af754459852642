"""Run-time setup of server processes: event loop, stop signals and their senders, limit of open files."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SI_KERNEL = 0x80
"""`si_code` of a signal that the kernel has sent (asm-generic/siginfo.h)."""
OPEN_FILES = 65_536
"""Limit of open files and connections of a coordinator or proxy, unless the hard limit is lower."""


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop if it is installed: unary calls cost a third less."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def stop_signals() -> set[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under `nohup`."""
    numbers = {signal.SIGTERM, signal.SIGINT}
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else numbers | {signal.SIGHUP}


def hold_stop_signals() -> None:
    """Keeps the stop signals pending until `stop_on_signals`.

    Must be called before other threads start: they inherit the mask, and so leave signals to the thread of
    `stop_on_signals`, which logs their sender.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def raise_file_limit() -> None:
    """Raises the soft limit of open files up to `OPEN_FILES`, where the hard limit allows it.

    The usual soft limit is 1,024, fewer than the connections of a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stop_on_signals() -> asyncio.Event:
    """An event that is set when a stop signal arrives or was pending. Logs the signal and the process that sent it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = stop_signals()
    hold_stop_signals()
    for number in numbers:  # a thread that a library started earlier may receive the signal; its sender is then unknown
        loop.add_signal_handler(number, partial(_stop, stop.set, number, "an unknown process"))
    threading.Thread(target=_wait_for_signals, args=(numbers, loop, stop), name="lmkv-signals", daemon=True).start()
    return stop


def _wait_for_signals(numbers: set[signal.Signals], loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: the process exits
        while True:
            info = signal.sigwaitinfo(numbers)
            sender = describe_sender(info.si_code, info.si_pid, info.si_uid)
            _stop(partial(loop.call_soon_threadsafe, stop.set), signal.Signals(info.si_signo), sender)


def _stop(stop: Callable[[], object], number: signal.Signals, sender: str) -> None:
    logger.warning("stopping: %s from %s", number.name, sender)
    stop()


def describe_sender(code: int, pid: int, user: int) -> str:
    """The process that sent a signal, from the kernel's fields."""
    if code == SI_KERNEL:
        return "the terminal or the kernel"
    if not pid:
        return "a process outside this container"
    try:
        name = repr(Path(f"/proc/{pid}/comm").read_text().rstrip("\n"))
    except OSError:
        name = "which has exited"
    return f"process {pid} ({name}), user {user}"


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns or raises as the first of the coroutines that ends, and cancels the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
