"""The commands of README and of the pages that get people started: which of them no test runs, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.promises.commands import bash_blocks

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "get-started").glob("*.md")))

RUN_BY_CI = {"README.md": "make demo", "cpu.md": "git clone"}
"""First words of the `bash` block of a page that `.ci/run` runs, but for `git clone` and `cd`: it starts in a clone."""

NOT_RUN = {
    ("README.md", "make images"): "needs a registry and a cluster; `make cluster` builds the images and runs the chart",
    ("gpu.md", ""): "needs a GPU, a Docker daemon and a model of Hugging Face",
    ("kubernetes.md", ""): "needs a registry and a cluster; `make cluster` runs the chart with the page's values",
}
"""By page and first words of a `bash` block, why neither tests nor CI run it. Tests run others from an empty folder."""


def not_run(page: Path, block: list[str]) -> str:
    """The reason why neither a test nor CI runs a block; empty if one does."""
    return next((why for (name, words), why in NOT_RUN.items() if page.name == name and block[0].startswith(words)), "")


def is_run_by_ci(page: Path, block: list[str]) -> bool:
    return page.name in RUN_BY_CI and block[0].startswith(RUN_BY_CI[page.name])


def blocks_to_run(page: Path) -> Iterator[list[str]]:
    """The `bash` blocks of a page that tests run, in order."""
    return (block for block in bash_blocks(page) if not not_run(page, block) and not is_run_by_ci(page, block))
