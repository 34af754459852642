"""Memory, owners in processes of their own, and scenarios in fresh processes: what tests of channels stand on."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lmkv.transfer import Channel, open_channel

MIB = 1 << 20


def environment(**more: str) -> dict[str, str]:
    """For processes that import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


class Memory:
    """Anonymous memory; `words` is all of it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.words: NDArray[np.uint64] = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint64)
        self.address = self.words.ctypes.data

    def open(self, agent_name: str) -> Channel:
        """A channel over it."""
        return open_channel("nixl", agent_name, self.address, self.size_bytes, ["UCX"])


def content(seed: int, size_bytes: int) -> NDArray[np.uint64]:
    """The words of an owner's memory: all different, and different for each seed."""
    return np.arange(size_bytes // 8, dtype=np.uint64) + np.uint64(seed << 40)


class Owner:
    """A process whose memory may be read. It serves until it is closed."""

    def __init__(self, name: str, seed: int = 1, size_bytes: int = 128 * MIB) -> None:
        self.name = name
        program = f"from tests.lmkv.transfer_ends import own; own({name!r}, {seed}, {size_bytes})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )
        assert self._process.stdout
        said = json.loads(self._process.stdout.readline())
        self.metadata = bytes.fromhex(said["metadata"])
        self.address = int(said["address"])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; returns from SIGKILL when it is dead."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        """Ends it."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own(name: str, seed: int, size_bytes: int) -> None:
    """What an owner's process does: serves until its standard input ends."""

    async def run() -> None:
        memory = Memory(size_bytes)
        memory.words[:] = content(seed, size_bytes)
        channel = memory.open(name)
        print(json.dumps({"metadata": channel.metadata.hex(), "address": memory.address}), flush=True)
        with channel.serving():
            await asyncio.to_thread(sys.stdin.read)
        await channel.aclose()

    asyncio.run(run())


def in_new_process(scenario: Callable[[], Coroutine[Any, Any, None]], **more: str) -> None:
    """Runs a scenario in a process of its own: UCX reads its environment once, when it is loaded."""
    module, name = scenario.__module__, scenario.__name__
    program = f"import asyncio, {module} as it; asyncio.run(it.{name}())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


class Stops:
    """An `on_stopped` that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1

    def happened(self) -> bool:
        """Whether it was called."""
        return self.count > 0
