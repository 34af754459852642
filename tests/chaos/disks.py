"""Disks that can be full: a tmpfs of a size of its own for each node that has one, in a mount namespace of theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from lmkv.errors import LmkvError
from lmkv_client.demo.process import ServerProcess

SIZE_BYTES = 48 << 20
READY_SECONDS = 120.0
_MOUNTED = "mounted"
_MOUNT = f'for folder; do mount -t tmpfs -o size={SIZE_BYTES} tmpfs "$folder" || exit; done'
_KEEP = f"echo {_MOUNTED}; exec sleep infinity"
"""The namespace exists as long as a process is in it."""


class Disks:
    """A context manager. Where user namespaces are not allowed there are folders instead, which are never full."""

    def __init__(self, names: Sequence[str], folder: Path, logs: Path) -> None:
        self.names = tuple(names)
        self.can_be_full = False
        self._folder = folder / "disks"
        keeper = ["sh", "-c", f"{_MOUNT}; {_KEEP}", "sh", *(str(self.path(name)) for name in names)]
        command = ["unshare", "--user", "--map-root-user", "--mount", *keeper]
        self._keeper = ServerProcess("disks", command, logs / "disks.log")

    def __enter__(self) -> Self:
        for name in self.names:
            self.path(name).mkdir(parents=True)
        try:
            self._keeper.start()
            self._keeper.wait_until(lambda: _MOUNTED in self._keeper.log(), "ready", READY_SECONDS)
            self.can_be_full = True
        except (LmkvError, FileNotFoundError):
            self._keeper.stop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.stop()

    def path(self, name: str) -> Path:
        """A node's disk, as the node sees it."""
        return self._folder / name

    def command(self, name: str) -> list[str]:
        """How a node's process starts, so that it sees its disk."""
        python = [sys.executable, "-m", "lmkv", "node"]
        if name not in self.names or not self.can_be_full:
            return python
        return ["nsenter", "--target", str(self._keeper.pid), "--user", "--mount", "--preserve-credentials", *python]

    def fill(self, name: str) -> None:
        """Leaves no byte free on a node's disk."""
        with suppress(OSError), self._filling(name).open("wb", buffering=0) as file:  # ends when nothing fits any more
            for size_bytes in (1 << 20, 4096):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size_bytes))

    def free(self, name: str) -> None:
        """Takes a `fill` back."""
        self._filling(name).unlink(missing_ok=True)

    def _filling(self, name: str) -> Path:
        return Path(f"/proc/{self._keeper.pid}/root{self.path(name)}", "filling")
