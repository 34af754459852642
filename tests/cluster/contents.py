"""What an image must not contain, and whether it lists its software. Runs in the image by itself: `python3 -c`.

Prints JSON: the paths of compilers, build tools and installers of packages, and the number of components in the list.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

SBOM = "usr/share/lmkv/sbom.cdx.json"
NOT_FILES = ("dev", "proc", "sys")
"""Folders of the root that are no files of the image."""
PROGRAMS = re.compile(
    r"([\w.]+-)*"  # x86_64-linux-gnu-
    r"(cc|c\+\+|gcc|g\+\+|cc1|cc1plus|collect2|clang|clang\+\+|nvcc|rustc|go|as|ld|ld\.\w+|make|gmake|cmake|meson|ninja"
    r"|pip|pipx|uv|conda|easy_install)"
    r"(-?\d[\d.]*)?"
)
"""Names of programs: `x86_64-linux-gnu-gcc-12` and `pip3.11` too."""
NOT_PROGRAMS = frozenset({"ld.so"})
"""The dynamic loader, which every program needs."""
PACKAGES = frozenset({"ensurepip", "pip", "setuptools", "wheel"})
"""Python packages that install or build others."""


class Contents(TypedDict):
    """What is printed."""

    installers: list[str]
    components: int


def installers(root: Path) -> Iterator[str]:
    """The paths below a root of programs that compile, build or install, and of Python packages that do."""
    for folder, folders, files in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in NOT_FILES]
        for name in folders:
            if name in PACKAGES and Path(folder, name, "__init__.py").exists():
                yield str(Path(folder, name))
        for name in files:
            if PROGRAMS.fullmatch(name) and name not in NOT_PROGRAMS and _is_program(Path(folder, name)):
                yield str(Path(folder, name))


def _is_program(file: Path) -> bool:
    """Whether a file may be executed; a link that leads nowhere may not."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & 0o111)


def component_count(root: Path) -> int:
    """The number of components that the image lists. Raises `ValueError` if that is no list of software."""
    text = Path(root, SBOM).read_text(encoding="utf-8")
    listed = json.loads(text)
    if listed.get("bomFormat") != "CycloneDX" or not listed.get("components"):
        raise ValueError(f"/{SBOM} lists no software")
    return len(listed["components"])


if __name__ == "__main__":
    ROOT = Path("/")
    json.dump(Contents(installers=sorted(installers(ROOT)), components=component_count(ROOT)), sys.stdout)
