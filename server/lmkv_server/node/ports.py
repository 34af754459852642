"""Binds the node's gRPC servers, with errors that name the node of this host that has the port."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.config.node import LOCK_FILE
from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder

STOP_GRACE_SECONDS = 0.5
"""Time for calls in flight to end when a server stops."""
LISTENING = "0A"
"""State of a listening socket in `/proc/net/tcp`."""
MAX_PID_DIGITS = 20


def bind(
    server: grpc.aio.Server,
    address: str,
    key: str,
    credentials: Credentials = rpc.PLAINTEXT,
    runtime_dir: Path | None = None,
) -> int:
    """Binds the server to an address; the port. Raises `ConfigError` that names `key` if the port is taken.

    The error also names the node that has the port, if it is one of those in `runtime_dir`.
    """
    try:
        return rpc.add_port(server, address, credentials)
    except RuntimeError:
        owner = describe_port(runtime_dir, int(address.rpartition(":")[2])) if runtime_dir else ""
        raise ConfigError(
            f"{key}: cannot listen on {address}; {owner or 'is it in use? choose another, or 0 for any free port'}",
            key=key,
        ) from None


def describe_port(runtime_dir: Path, port: int) -> str:
    """Names the node in a runtime folder that listens on a port, and the fix; empty if none does."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for lock in sorted(runtime_dir.glob(f"*/{LOCK_FILE}")):
        with suppress(OSError, ValueError, ConfigError):
            with (
                Folder.private(lock.parent, "runtime_dir", make=False) as folder,
                os.fdopen(folder.open(LOCK_FILE, os.O_RDONLY)) as file,
            ):
                pid = int(file.read(MAX_PID_DIGITS))
            if inodes & set(_open_files(pid)):
                return (
                    f"the node of instance {lock.parent.name!r} (process {pid}) has it, and stays for its node_linger "
                    f"after its last engine; stop it with `kill {pid}`, or choose another port"
                )
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(descriptor.readlink())
