"""Memory, owners in processes of their own, and what tests of channels wait for and compare."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lmkv.pool.pool import Pool
from lmkv.transfer import Channel, ChannelEnd, Copy, open_channel
from lmkv.transfer.access import PeerReader, ReadAccess
from tests.waiting import until

MIB = 1 << 20
SIZE = 64 * MIB
GRANT_ID = "a" * 32

eventually = until


def environment(**more: str) -> dict[str, str]:
    """For processes that import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


class Memory:
    """A pool; `words` is all of it."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self.pool = Pool.create(size_bytes)
        self.size_bytes = size_bytes
        self.address = self.pool.address
        self.words: NDArray[np.uint64] = np.frombuffer(self.pool.buffer, np.uint64)
        self.access = ReadAccess()

    async def open(self, kind: str, name: str, folder: Path | None = None) -> Channel:
        """A channel over it; its socket, if it has one, is in `folder`."""
        return await open_channel(kind, self.end(name, folder))

    def end(self, name: str, folder: Path | None = None, options: Mapping[str, str] | None = None) -> ChannelEnd:
        """What a channel over it stands on."""
        socket_path = folder / f"{name}.sock" if folder else None
        return ChannelEnd(name=name, pool=self.pool, socket_path=socket_path, access=self.access, options=options or {})

    def admit(self, peer_name: str = "reader:1") -> PeerReader:
        """A reader that may read all of it under `GRANT_ID`."""
        reader = self.access.admit(peer_name)
        self.access.open(GRANT_ID, [(self.address, self.size_bytes)], reader=reader)
        return reader

    def close(self) -> None:
        """Gives it back."""
        del self.words
        self.pool.close()


def content(seed: int, size_bytes: int = SIZE) -> NDArray[np.uint64]:
    """The words of an owner's memory: all different, and different for each seed."""
    return np.arange(1, size_bytes // 8 + 1, dtype=np.uint64) + np.uint64(seed << 40)


class Owner:
    """A process whose memory peers may read. It serves until it is closed, or its channel is closed on request."""

    def __init__(self, kind: str, name: str, folder: Path, seed: int = 1, size_bytes: int = SIZE) -> None:
        self.name = name
        program = (
            f"from tests.lmkv.transfer.ends import own; own({kind!r}, {name!r}, {str(folder)!r}, {seed}, {size_bytes})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )
        said = self._heard()
        self.metadata = bytes.fromhex(said["metadata"])
        self.address = int(said["address"])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; returns from SIGKILL when it is dead."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def ask(self, order: str) -> Any:
        """Has it carry out an order, such as `close` for its channel; its answer."""
        assert self._process.stdin
        self._process.stdin.write(order.encode() + b"\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def own(kind: str, name: str, folder: str, seed: int, size_bytes: int) -> None:
    """What an owner's process does: serves, and carries out orders, until its standard input ends."""

    async def run() -> None:
        memory = Memory(size_bytes)
        memory.words[:] = content(seed, size_bytes)
        channel = await memory.open(kind, name, Path(folder))
        channel.serve(True)
        reader = memory.admit()
        _say({"metadata": channel.metadata_for(reader).hex(), "address": memory.address})
        while order := (await asyncio.to_thread(sys.stdin.readline)).split():
            answer: Any = None
            match order:
                case ["close"]:
                    await channel.aclose()
                case ["damage"]:
                    memory.words[:] = 0
                case ["grant", grant_id, start, size]:
                    memory.access.open(grant_id, [(memory.address + int(start), int(size))], reader=reader)
                case ["grant-another", grant_id]:
                    whole_memory = [(memory.address, memory.size_bytes)]
                    memory.access.open(grant_id, whole_memory, reader=memory.access.admit("another:1"))
                case ["end", grant_id]:
                    memory.access.close(grant_id)
                case ["refused"]:
                    answer = memory.access.refused_count
            _say(answer)
        await channel.aclose()
        memory.close()

    asyncio.run(run())


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def whole(owner: Owner, memory: Memory, size_bytes: int = SIZE) -> list[Copy]:
    """All of the owner's memory, or its beginning, in runs of 8 MiB."""
    step = 8 * MIB
    return [
        Copy(
            remote_address=owner.address + at, local_address=memory.address + at, size_bytes=min(step, size_bytes - at)
        )
        for at in range(0, size_bytes, step)
    ]


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


class Stops:
    """An `on_stopped` that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1

    def happened(self) -> bool:
        """Whether it was called."""
        return self.count > 0
