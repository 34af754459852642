"""Commands that our pages tell people to type."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def command_lines(page: Path, program: str) -> list[list[str]]:
    """Words of every command line of `program` in code blocks and inline code, without the remark behind it."""
    text = page.read_text()
    lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    lines += INLINE.findall(BLOCK.sub("", text))
    commands = [re.split(r" {2,}| \| ", line.strip())[0] for line in lines]
    return [shlex.split(command) for command in commands if command.startswith(f"{program} ")]


def takes(point: EntryPoint, arguments: Sequence[str]) -> None:
    """Has the command parse its arguments; exits on an unknown flag."""
    parser = argparse.ArgumentParser()
    point.load().add_arguments(parser)
    parser.parse_args(list(arguments))
