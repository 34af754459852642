"""Commands on our pages that readers type."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


ASSIGNMENTS = re.compile(r"^(?:[A-Z_0-9]+=\S+ )+")


def command_lines(page: Path, program: str) -> list[list[str]]:
    """Words of every command line of `program` in code blocks and inline code.

    Variables set before it and the remark behind it are left out; lines that end in a backslash are joined.
    """
    text = page.read_text()
    lines = [line for block in BLOCK.findall(text) for line in joined(block)]
    lines += INLINE.findall(BLOCK.sub("", text))
    commands = [ASSIGNMENTS.sub("", re.split(r" {2,}| \| ", line.strip())[0]) for line in lines]
    return [shlex.split(command) for command in commands if command.startswith(f"{program} ")]


def bash_blocks(page: Path) -> list[list[str]]:
    """The lines of each `bash` block of a page, with lines that end in a backslash joined."""
    return [joined(block) for block in BASH.findall(page.read_text())]


def make(
    *arguments: str, cwd: Path = ROOT, timeout_seconds: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `make` as people do, not as a part of the `make` that runs the tests; fails with its output if it fails."""
    outer = ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in outer} | variables
    done = subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def joined(block: str) -> list[str]:
    """The lines of a code block; a backslash at the end joins a line with the next one."""
    return re.sub(r"\\\n\s*", "", block).splitlines()


def takes(point: EntryPoint, arguments: Sequence[str]) -> None:
    """Has the command parse its arguments; exits on an unknown flag."""
    parser = argparse.ArgumentParser()
    point.load().add_arguments(parser)
    parser.parse_args(list(arguments))
