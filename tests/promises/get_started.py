"""The commands of README and of the pages that get people started: which of them no test runs, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.promises.commands import bash_blocks

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "get-started").glob("*.md")))

NOT_RUN = {
    ("README.md", "make demo"): "installs into the clone first; tests/engines/test_demo.py runs the demo",
    (
        "README.md",
        "make images",
    ): "takes minutes and needs a registry and a cluster; `make cluster` runs images and chart",
    ("cpu.md", "git clone"): "needs GitHub; the rest as in README",
    ("gpu.md", ""): "needs a GPU, a Docker daemon and a model of Hugging Face",
    ("kubernetes.md", ""): "needs a Docker daemon, a registry and a cluster",
}
"""By page and first words of a `bash` block, why no test runs it. All others are run from an empty folder."""


def not_run(page: Path, block: list[str]) -> str:
    """The reason why no test runs a block; empty if one does."""
    return next((why for (name, words), why in NOT_RUN.items() if page.name == name and block[0].startswith(words)), "")


def blocks_to_run(page: Path) -> Iterator[list[str]]:
    """The `bash` blocks of a page that tests run, in order."""
    return (block for block in bash_blocks(page) if not not_run(page, block))
