"""Node.js for the tests of the TypeScript package: its compiler and linter, and runs of what it compiles."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "client/typescript"
RUN_SECONDS = 180.0
BUILD_SECONDS = 300.0
ASK = "ask: "
"""How a test on Node.js begins a line that asks its caller to do something."""

Act = Callable[[], Awaitable[None] | None]


def tool(name: str, *arguments: str, cwd: Path = PACKAGE) -> None:
    """Runs a tool of the package. Fails the test with what it says if it fails."""
    program = PACKAGE / "node_modules/.bin" / name
    if not program.exists():
        pytest.fail(f"{program} is missing: install npm and run `make setup`")
    command = [str(program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=BUILD_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"


def compile_package(folder: Path, **more: str) -> Path:
    """Compiles the package and its tests, and further tests by name; returns where the tests are.

    What they import as `lmkv-client` is what `package.json` says it is. Fails the test if a type is wrong.
    """
    for name in ("src", "tests"):
        shutil.copytree(PACKAGE / name, folder / name)
    for name in ("package.json", "tsconfig.json"):
        shutil.copy(PACKAGE / name, folder)
    for name, text in more.items():
        (folder / f"tests/{name}.ts").write_text(text)
    (folder / "dist").symlink_to(folder / "build/src")
    (folder / "node_modules").symlink_to(PACKAGE / "node_modules")
    tool("tsc", "-p", "tests", cwd=folder)
    return folder / "build/tests"


async def run_node(script: Path, setting: Mapping[str, Any], acts: Mapping[str, Act] | None = None) -> str:
    """Runs a script with a setting; what it asks for is done meanwhile. Returns all it said.

    Fails the test with that if the script fails, or has not ended in time.
    """
    process = await asyncio.create_subprocess_exec(
        "node",
        "--enable-source-maps",
        script,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"SETTING": json.dumps(setting), "NO_COLOR": "1"},
    )
    assert process.stdout is not None
    said = ""
    try:
        async with asyncio.timeout(RUN_SECONDS):
            async for line in process.stdout:
                said += line.decode()
                wanted = line.decode().partition(ASK)
                if wanted[1] and (doing := (acts or {})[wanted[2].strip()]()):
                    await doing
            await process.wait()
    except TimeoutError:
        pytest.fail(f"{script.name} did not end within {RUN_SECONDS:.0f} s:\n{said}")
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    assert process.returncode == 0, f"{script.name} failed:\n{said}"
    return said
