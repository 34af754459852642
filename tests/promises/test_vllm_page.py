"""What docs/guides/vllm.md says of vLLM's features has the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_the_page_names_exists(root: Path) -> None:
    named = TEST.findall((root / "docs" / "guides" / "vllm.md").read_text())
    assert len(named) > 20, "the table names tests by another pattern"
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", (root / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_every_feature_says_what_becomes_of_it_and_how_one_knows(root: Path) -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (root / "docs" / "guides" / "vllm.md").read_text(), re.MULTILINE)
    for feature, _, shown_by in rows[1:]:
        assert shown_by == "none" or TEST.fullmatch(shown_by), f"{feature}: {shown_by}"
