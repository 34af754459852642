"""Whether NIXL is there and its backends start: tried in a process of its own, since it may crash or hang.

Run as a module it is that process: `python -m lmkv_client.commands.doctor.transfer CHANNEL BACKEND...`.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence

from lmkv.config import NodeConfig
from lmkv.errors import LmkvError
from lmkv.transfer import open_channel
from lmkv.units import format_duration
from lmkv_client.commands.doctor.finding import Finding, fail, ok

START_SECONDS = 60.0
MEMORY_BYTES = 1 << 20
_MARK = "lmkv: error: "


def check_transfer(config: NodeConfig) -> Iterator[Finding]:
    """Whether bytes could move between nodes."""
    if not config.enable_p2p:
        yield ok("transfer", "none is needed: enable_p2p is false")
        return
    begin = time.monotonic()
    command = [sys.executable, "-m", __name__, config.transfer_channel, *config.nixl_backends]
    what = f"{config.transfer_channel} with {', '.join(config.nixl_backends)}"
    ucx = f", UCX_TLS={os.environ['UCX_TLS']}" if "UCX_TLS" in os.environ else ""
    try:
        done = subprocess.run(  # noqa: S603 # it is this module
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        yield fail("transfer", f"{what}{ucx} did not start within {START_SECONDS:.0f} s; set nixl_backends or UCX_TLS")
        return
    if done.returncode == 0:
        yield ok("transfer", f"{what}{ucx} started in {format_duration(time.monotonic() - begin)}")
        return
    said = [line.removeprefix(_MARK) for line in done.stderr.splitlines() if line.startswith(_MARK)]
    crash = f"{what}{ucx} ended with code {done.returncode}: {' '.join(done.stderr.split())[-300:] or 'no word'}"
    yield fail("transfer", said[-1] if said else crash)


def try_channel(name: str, backends: Sequence[str]) -> None:
    """Opens the channel over a little memory, and closes it. Raises `LmkvError` if it does not start."""
    memory = mmap.mmap(-1, MEMORY_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    channel = open_channel(name, f"doctor-{uuid.uuid4().hex}", address, MEMORY_BYTES, backends)
    asyncio.run(channel.aclose())


if __name__ == "__main__":
    try:
        try_channel(sys.argv[1], sys.argv[2:])
    except LmkvError as error:
        print(f"{_MARK}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
