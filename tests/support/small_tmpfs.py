"""Runs Python scripts on a small tmpfs, so that memory runs out without affecting other processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size="$1" tmpfs "$2" && exec "$3" -c "$4" "$2"'


def on_small_tmpfs(folder: Path, size_bytes: int, script: str) -> str:
    """The output of a script. Its argument is the folder, on which a tmpfs of that size is mounted only for it."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let tests mount a tmpfs (user namespaces)")
    command = [*unshare, _MOUNT, "sh", str(size_bytes), str(folder), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
