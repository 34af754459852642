"""Memory, owners in processes of their own, and what tests of channels wait for and compare."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.auth.credentials import Credentials
from lmkv.pool.pool import Pool
from lmkv.transfer import Channel, ChannelEnd, Copy, open_channel
from lmkv.transfer.channel import PeerReader, ReadAccess
from tests.support.fork_server import start_module
from tests.support.ordered_process import OrderedProcess
from tests.waiting import WAIT_SECONDS, until

MIB = 1 << 20
SIZE = 64 * MIB
GRANT_ID = "a" * 32
TLS_VARIABLE = "LMKV_TESTS_TLS_FOLDER"
"""Variable with a folder of certificates for all ends; not set: they do not encrypt."""

eventually = until


def environment(**more: str) -> dict[str, str]:
    """For processes that import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def _is_stopped(thread: Path) -> bool:
    """Whether a thread, by its folder in /proc, has stopped, or has ended meanwhile."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except FileNotFoundError:
        return True


def tls_of_environment() -> Credentials | None:
    """The certificates of `TLS_VARIABLE`, for all ends of a scenario."""
    folder = os.environ.get(TLS_VARIABLE)
    if not folder:
        return None
    ca, cert, key = (str(Path(folder, name)) for name in ("ca.pem", "cert.pem", "key.pem"))
    return Credentials(ca=ca, cert=cert, key=key, client_ca=ca)


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

    def end(
        self,
        name: str,
        folder: Path | None = None,
        options: Mapping[str, str] | None = None,
        tls: Credentials | None = None,
    ) -> ChannelEnd:
        """What a channel over it stands on."""
        return ChannelEnd(
            name=name,
            pool=self.pool,
            socket_path=folder / f"{name}.sock" if folder else None,
            access=self.access,
            options=options or {},
            tls=tls or tls_of_environment(),
        )

    def admit(self, peer_name: str = "reader:1") -> PeerReader:
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


class Owner(OrderedProcess):
    """A process whose memory peers may read. It serves until it is closed, or its channel is closed on request."""

    def __init__(self, kind: str, name: str, folder: Path, seed: int = 1, size_bytes: int = SIZE) -> None:
        self.name = name
        arguments = (kind, name, folder, seed, size_bytes)
        super().__init__(start_module("tests.lmkv.transfer.ends", *arguments, environment=environment()))
        said = self._heard()
        self.metadata = bytes.fromhex(said["metadata"])
        self.address = int(said["address"])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; returns from SIGKILL when it is dead, from SIGSTOP when each of its threads has stopped."""
        super().signal(number)
        threads = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + WAIT_SECONDS
        while number == signal.SIGSTOP and not all(_is_stopped(thread) for thread in threads.iterdir()):
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)


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
        timeout=200,
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


if __name__ == "__main__":
    own(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
