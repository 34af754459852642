"""Runs `podman`, and removes what earlier runs left."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

PREFIX = "lmkv-cluster"
"""What the names of pods, containers and networks begin with, and their label."""

MAX_FILES = 65536
MAX_PROCESSES = 2000
"""Limit of processes and threads of all containers of one user."""


class PodmanError(RuntimeError):
    """A command of Podman that failed, with its output."""


class Podman:
    """Podman with runc, as it also works in virtual machines and containers: without systemd, with our own limits."""

    def __init__(self, folder: Path) -> None:
        config = folder / "containers.conf"
        config.write_text(configuration())
        self._environment = {**os.environ, "CONTAINERS_CONF": str(config)}

    async def __call__(self, *words: str, check: bool = True) -> str:
        """The output of a command. Raises `PodmanError` if it fails and `check` is set."""
        process = await asyncio.create_subprocess_exec(
            *("podman", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        out, err = await process.communicate()
        if check and process.returncode:
            raise PodmanError(f"podman {' '.join(words)}: {err.decode().strip()}")
        return out.decode().strip()

    async def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output of a command, errors included."""
        process = await asyncio.create_subprocess_exec(
            *("podman", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        out, _ = await process.communicate()
        return process.returncode or 0, out.decode().strip()

    async def remove_all(self) -> None:
        """Removes all pods, containers and networks of this and earlier runs."""
        label = f"label={PREFIX}"
        for listing, removal in (
            (("pod", "ls", "--format", "{{.Name}}"), ("pod", "rm", "--force", "--time", "0")),
            (("ps", "--all", "--format", "{{.Names}}"), ("rm", "--force", "--time", "0")),
            (("network", "ls", "--format", "{{.Name}}"), ("network", "rm", "--force")),
        ):
            if names := (await self(*listing, "--filter", label)).split():
                await self(*removal, *names, check=False)


def configuration() -> str:
    """A containers.conf. Limits are low enough to be set on any machine: containers cannot raise ours."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if files == resource.RLIM_INFINITY else min(files, MAX_FILES)
    return f"""\
[containers]
default_ulimits = ["nofile={limit}:{limit}", "nproc={MAX_PROCESSES}:{MAX_PROCESSES}"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""
