"""docs/reference/models.md names the architectures that tests run, and which of their answers are not compared."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.models import ARCHITECTURES


def test_the_page_names_every_architecture_and_those_whose_answers_are_not_compared(root: Path) -> None:
    page = (root / "docs" / "reference" / "models.md").read_text()
    (tested,) = re.findall(r"^Tests run tiny models.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", tested)) == set(ARCHITECTURES)
    (inexact,) = re.findall(r"; of ([^;]*) answers are not\s+compared", tested)
    assert re.findall(r"`(\w+)`", inexact) == [name for name, one in ARCHITECTURES.items() if not one.steps_exactly]
