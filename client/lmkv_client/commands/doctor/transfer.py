"""Checks each channel in a process of its own, since a library may crash or hang.

Run as a module it is that process: `python -m lmkv_client.commands.doctor.transfer CHANNEL FOLDER BACKEND...`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmkv.config import NodeConfig
from lmkv.errors import LmkvError
from lmkv.pool.pool import Pool
from lmkv.transfer import ChannelEnd, names_of, open_channel
from lmkv.transfer.channels import AUTO
from lmkv.transfer.choice import find_links, missing_link
from lmkv.units import format_duration
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn
from lmkv_client.commands.doctor.host import existing_folder

OWN_NAMES = ("shm", "tcp")
"""Channels that need no library, and start wherever a node does."""
START_SECONDS = 60.0
MEMORY_BYTES = 1 << 20
_MARK = "lmkv: error: "


def check_transfer(config: NodeConfig) -> Iterator[Finding]:
    """Checks which channels can transfer chunks between nodes."""
    if not config.enable_p2p:
        yield ok("transfer", "not needed: enable_p2p is false")
        return
    folder = existing_folder(config.instance_dir)
    if not os.access(folder, os.W_OK | os.X_OK):
        yield warn(
            "transfer", f"not tried: channels create sockets in runtime_dir, and this user may not write to {folder}"
        )
        return
    links = find_links()
    names = names_of(config.transfer_channel, links)
    for name in names:
        finding = _check(name, config.nixl_backends, folder)
        others = [other for other in names if other != name]
        if finding.level == "ok" and others and (missing := missing_link(name, links)):
            finding = ok("transfer", f"{finding.text}; the last resort, because this host has no {missing}")
        if finding.level == "fail" and others:
            finding = warn("transfer", f"{finding.text}; without it chunks are transferred by {' or '.join(others)}")
        yield finding


def check_library(config: NodeConfig) -> Iterator[Finding]:
    """Whether the one channel that is configured starts, if it is a library's; with `auto` another channel is used."""
    if config.enable_p2p and config.transfer_channel not in (AUTO, *OWN_NAMES):
        yield from check_transfer(config)


def _check(name: str, backends: Sequence[str], folder: Path) -> Finding:
    begin = time.monotonic()
    command = [sys.executable, "-m", __name__, name, str(folder), *backends]
    what = f"nixl with {', '.join(backends)}" if name == "nixl" else name
    ucx = f", UCX_TLS={os.environ['UCX_TLS']}" if "UCX_TLS" in os.environ and name in ("nixl", "ucx") else ""
    try:
        done = subprocess.run(  # noqa: S603 # it is this module
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        return fail("transfer", f"{what}{ucx} did not start within {START_SECONDS:.0f} s; set transfer_channel")
    if done.returncode == 0:
        return ok("transfer", f"{what}{ucx} started in {format_duration(time.monotonic() - begin)}")
    said = [line.removeprefix(_MARK) for line in done.stderr.splitlines() if line.startswith(_MARK)]
    crash = f"{what}{ucx} ended with code {done.returncode}: {' '.join(done.stderr.split())[-300:] or 'no word'}"
    return fail("transfer", said[-1] if said else crash)


async def try_channel(name: str, folder: str, backends: Sequence[str]) -> None:
    """Opens the channel with a small pool and a socket in a new folder within `folder`, and closes it.

    Raises `LmkvError` if it does not start.
    """
    with Pool.create(MEMORY_BYTES) as pool, tempfile.TemporaryDirectory(prefix="lmkv-", dir=folder) as own:
        end = ChannelEnd(
            name=f"doctor-{uuid.uuid4().hex}",
            pool=pool,
            socket_path=Path(own, "s"),
            nixl_backends=tuple(backends),
        )
        await (await open_channel(name, end)).aclose()


if __name__ == "__main__":
    try:
        asyncio.run(try_channel(sys.argv[1], sys.argv[2], sys.argv[3:]))
    except LmkvError as error:
        print(f"{_MARK}{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
