"""An image of the cases: builds it with buildah, and checks what it contains."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.cluster import contents
from tests.cluster.podman import PREFIX, Podman, PodmanError

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 2 * 3600.0
STOP_SECONDS = 10.0
CONTENTS_SECONDS = 120.0
PROGRAM = Path(contents.__file__).read_text(encoding="utf-8")
CHECKED = ("lmkv", "lmkv-node")
"""vLLM requires tools that compile."""


class ImageError(RuntimeError):
    """Images that cannot be built or contain what they must not, with the reason."""


def parts(image: str) -> tuple[str, str, str]:
    """Registry, name and tag: `a`, `lmkv`, `1` of `a/lmkv:1`."""
    registry, _, rest = image.rpartition("/")
    name, _, tag = rest.partition(":")
    return registry, name, tag


async def build(image: str, log: Path) -> None:
    """Builds an image where Podman finds it. Raises `ImageError`."""
    registry, name, version = parts(image)
    command = [
        *(sys.executable, str(ROOT / "scripts" / "images"), "--builder", "buildah"),
        *("--registry", registry, "--version", version, name),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                code = await process.wait()
        finally:
            await _stop(process)
    if code:
        raise ImageError(f"exit code {code}; {_last_line(log)!r} is the end of {log}")


def _last_line(log: Path) -> str:
    return log.read_text(errors="replace").rstrip().rpartition("\n")[2]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ends a process that still runs, and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()


async def check_contents(image: str) -> str:
    """The number of components that an image lists. Raises `ImageError` if it contains compilers or installers."""
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as folder:
        found = await _contents(Podman(Path(folder)), image)
    if found["installers"]:
        raise ImageError(f"contains {', '.join(found['installers'])}")
    return f"{found['components']} components listed, no compiler, build tool or pip"


async def _contents(podman: Podman, image: str) -> contents.Contents:
    """What the program in `contents` finds in an image."""
    words = ("run", "--rm", "--pull", "never", "--network", "none", "--user", "0", "--label", f"{PREFIX}=contents")
    async with asyncio.timeout(CONTENTS_SECONDS):
        try:
            output = await podman(*words, "--entrypoint", "python3", image, "-I", "-c", PROGRAM)
        except PodmanError as error:  # its message begins with the program
            _, _, last_line = str(error).rpartition("\n")
            raise ImageError(f"{image}: {last_line}") from error
    found: contents.Contents = json.loads(output)
    return found
