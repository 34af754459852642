"""What the README and CONTRIBUTING tell people to type exists."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.promises.commands import command_lines, takes

PAGES = ("README.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_in_the_pages_exists(root: Path, page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in command_lines(root / page, "make") for word in line[1:] if re.fullmatch(r"[a-z-]+", word)}
    assert named, "the page names no target; is the pattern still right?"
    assert named <= targets


def test_every_lmkv_command_in_the_readme_exists_and_takes_its_flags(root: Path, pyproject: dict[str, Any]) -> None:
    points = pyproject["project"]["entry-points"]["lmkv.commands"]
    lines = command_lines(root / "README.md", "lmkv")
    assert {"coordinator", "lookup", "instances"} <= {line[1] for line in lines}
    for _, name, *arguments in lines:
        assert name in points, f"README names `lmkv {name}`"
        takes(EntryPoint(name, points[name], "lmkv.commands"), arguments)


def test_the_demo_takes_the_flags_that_the_readme_passes_on(root: Path, pyproject: dict[str, Any]) -> None:
    command = EntryPoint("demo", pyproject["project"]["entry-points"]["lmkv.commands"]["demo"], "")
    passed_on = re.findall(r'make demo ARGS="([^"]*)"', (root / "README.md").read_text())
    assert passed_on
    for arguments in passed_on:
        if arguments != "--help":
            takes(command, shlex.split(arguments))


def test_every_folder_in_the_map_is_there(root: Path) -> None:
    _, _, text = (root / "README.md").read_text().partition("## Where things are")
    folders = re.findall(r"^\| `([a-z0-9_/]+)` \|", text, re.MULTILINE)
    assert len(folders) >= 6
    assert [folder for folder in folders if not (root / folder).is_dir()] == []


def test_every_configuration_key_in_the_readme_is_one(root: Path) -> None:
    from lmkv.config import ConnectorConfig, CoordinatorConfig, keys

    known = {*keys(ConnectorConfig), *keys(CoordinatorConfig)}
    text = (root / "README.md").read_text()
    yaml_blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    named = {name for block in yaml_blocks for name in re.findall(r"^([a-z_0-9]+):", block, re.MULTILINE)}
    named |= {name.lower() for name in re.findall(r"\bLMKV_([A-Z_0-9]+)=", text)} - {"config_file"}
    assert len(named) > 3
    assert named <= known
