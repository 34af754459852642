"""How a server process of lmkv runs: on the fastest event loop available, until a signal or a failure ends it."""

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
"""`si_code` of a signal that no process has sent (asm-generic/siginfo.h)."""
OPEN_FILES = 65_536
"""Files and connections that a coordinator or a proxy may have open, unless the hard limit is lower."""


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loop, where there is uvloop: it takes a third off what a unary call costs."""
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

    To be called before other threads start: they inherit the mask, so that no thread takes a signal whose sender the
    thread of `stop_on_signals` should learn.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def raise_file_limit() -> None:
    """Raises the soft limit of open files up to `OPEN_FILES`, where the hard limit allows it.

    The usual soft limit of 1,024 is less than the connections that a server serves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def stop_on_signals() -> asyncio.Event:
    """Set when a stop signal arrives, or was pending; a log line says which signal and which process sent it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = stop_signals()
    hold_stop_signals()
    for number in numbers:  # a thread that a library started earlier may take a signal; its sender is then unknown
        loop.add_signal_handler(number, partial(_stop, stop.set, number, "an unknown process"))
    threading.Thread(target=_wait_for_signals, args=(numbers, loop, stop), name="lmkv-signals", daemon=True).start()
    return stop


def _wait_for_signals(numbers: set[signal.Signals], loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: the process ends
        while True:
            info = signal.sigwaitinfo(numbers)
            sender = describe_sender(info.si_code, info.si_pid, info.si_uid)
            _stop(partial(loop.call_soon_threadsafe, stop.set), signal.Signals(info.si_signo), sender)


def _stop(stop: Callable[[], object], number: signal.Signals, sender: str) -> None:
    logger.warning("stopping: %s from %s", number.name, sender)
    stop()


def describe_sender(code: int, pid: int, user: int) -> str:
    """The process that sent a signal, by what the kernel says of it."""
    if code == SI_KERNEL:
        return "the terminal or the kernel"
    if not pid:
        return "a process outside this container"
    try:
        name = repr(Path(f"/proc/{pid}/comm").read_text().rstrip("\n"))
    except OSError:
        name = "which has ended"
    return f"process {pid} ({name}), user {user}"


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
