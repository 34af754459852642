"""Every seeded fault applies to this tree and names tests that exist. `make mutants` shows that they catch it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.mutant import FOLDER, ROOT, Mutant, caught_by, read, select


@pytest.mark.parametrize("mutant", select(), ids=lambda mutant: mutant.name)
def test_the_patch_applies_and_its_tests_exist(mutant: Mutant) -> None:
    checked = subprocess.run(
        ["git", "apply", "--check", str(mutant.patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, f"the code has changed; make the patch again:\n{checked.stderr}"
    assert [test for test in mutant.tests if not (ROOT / test).is_file()] == []
    changed = [line for line in mutant.patch.read_text().splitlines() if line.startswith("+++ b/")]
    assert changed
    assert not [line for line in changed if line.startswith("+++ b/tests/")], "it changes tests"


def test_there_are_mutants_of_every_process() -> None:
    components = {mutant.name.partition("-")[0] for mutant in select()}
    assert components == {"connector", "coordinator", "engine", "lmkv", "node", "proxy", "webhook"}
    assert len(select()) >= 25


def test_a_patch_without_a_complete_header_is_refused(tmp_path: Path) -> None:
    patch = tmp_path / "node-x.patch"
    patch.write_text("Fault: one\nTests: tests/lmkv/test_keys.py\n\ndiff --git a/x b/x\n")
    with pytest.raises(ValueError, match="wanted Fault, Promise, Model, Tests"):
        read(patch)


def test_names_select_by_their_beginning() -> None:
    assert [mutant.name for mutant in select(["lmkv-"])] == sorted(path.stem for path in FOLDER.glob("lmkv-*.patch"))
    with pytest.raises(ValueError, match="no mutant begins with 'x'"):
        select(["x"])


@pytest.mark.parametrize(
    ("line", "test"),
    [
        ("FAILED tests/a/test_b.py::test_c[1-x y] - assert 1 == 2", "tests/a/test_b.py::test_c"),
        ("ERROR tests/a/test_b.py::test_c - RuntimeError", "tests/a/test_b.py::test_c"),
        ("ERROR tests/a/test_b.py - SyntaxError", ""),
        ("3 passed in 0.1s", ""),
    ],
)
def test_the_first_failed_test_is_taken_from_the_summary(line: str, test: str) -> None:
    assert caught_by(f"..F\n= short test summary info =\n{line}\nFAILED tests/z.py::test_z") == (
        test or "tests/z.py::test_z"
    )
    assert caught_by(line) == test
