"""A folder whose file system stops answering: bindfs shows another folder, and is stopped by a signal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import pytest

START_SECONDS = 20.0


class HangingFolder:
    """A folder in user space. `freeze` lets every call that is not answered by the kernel hang, until `thaw`.

    A context manager; skips the test where file systems in user space cannot be mounted.
    """

    def __enter__(self) -> Self:
        if not shutil.which("bindfs") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
            pytest.skip("needs bindfs, and permission to mount file systems in user space (/dev/fuse)")
        self._made = TemporaryDirectory(prefix="lmkv-hanging-")
        self.source, self.path = Path(self._made.name, "source"), Path(self._made.name, "mounted")
        self.source.mkdir()
        self.path.mkdir()
        uncached = "attr_timeout=0,entry_timeout=0,negative_timeout=0"
        command = ["bindfs", "-f", "-o", uncached, str(self.source), str(self.path)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        waiting = f"until mountpoint -q {self.path}; do kill -0 {self._process.pid} || exit 1; done"
        if subprocess.run(["sh", "-c", waiting], timeout=START_SECONDS, check=False).returncode:
            self.__exit__()
            pytest.skip("bindfs may not mount here")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # which ends what hangs
        self._process.wait()
        subprocess.run(["umount", "-l", str(self.path)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["fusermount", "-uz", str(self.path)], stderr=subprocess.DEVNULL, check=False)
        self._made.cleanup()

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)
