"""docs/reference/models.md lists the architectures and the features that tests show."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.models import ARCHITECTURES


def test_the_table_has_a_row_for_every_architecture_and_a_column_for_every_test(root: Path) -> None:
    page = (root / "docs" / "reference" / "models.md").read_text()
    tests = re.findall(
        r"^def (test_\w+)\(", (root / "tests" / "engines" / "test_architectures.py").read_text(), re.MULTILINE
    )
    columns = re.findall(r"^\| (\d+) \| .+ \| `(test_\w+)` \|$", page, re.MULTILINE)
    assert [name for _, name in columns] == tests
    assert [int(number) for number, _ in columns] == list(range(1, len(tests) + 1))
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(ARCHITECTURES)
    for name, cells in rows:
        compared = [
            "yes" if ARCHITECTURES[name].steps_exactly or ("at_once" not in test and "continued" not in test) else "hit"
            for test in tests
        ]
        assert cells.split(" | ") == compared
