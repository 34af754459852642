"""Seeded faults: each is a patch in this folder, whose first lines say what it breaks and which tests catch it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FIELDS = ("Fault", "Promise", "Model", "Tests")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault."""

    patch: Path
    fault: str
    """What the mutated code does."""
    promise: str
    """What it breaks."""
    model: str
    """The bug, of lmkv or of another project, or the class of bugs that it is an example of."""
    tests: tuple[str, ...]
    """Paths of the test files that catch it."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.patch.stem


def read(patch: Path) -> Mutant:
    """Reads a patch. Raises `ValueError` if its header is incomplete."""
    header, _, _ = patch.read_text(encoding="utf-8").partition("\n\n")
    fields = dict(re.findall(r"^(\w+): (.+)$", header, re.MULTILINE))
    if tuple(fields) != FIELDS:
        raise ValueError(f"{patch.name}: the header has {', '.join(fields) or 'nothing'}; wanted {', '.join(FIELDS)}")
    return Mutant(
        patch=patch,
        fault=fields["Fault"],
        promise=fields["Promise"],
        model=fields["Model"],
        tests=tuple(fields["Tests"].split()),
    )


def select(names: Sequence[str] = ()) -> list[Mutant]:
    """The mutants of these names, or whose names begin with one of them; all without names.

    Raises `ValueError` if a name selects none.
    """
    mutants = [read(patch) for patch in sorted(FOLDER.glob("*.patch"))]
    for name in names:
        if not any(one.name.startswith(name) for one in mutants):
            raise ValueError(f"no mutant begins with {name!r}; known are: {', '.join(one.name for one in mutants)}")
    return [one for one in mutants if not names or one.name.startswith(tuple(names))]


def caught_by(output: str) -> str:
    """The first test that failed, from pytest's summary; empty if none did."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+::[^\s\[]+)", output, re.MULTILINE)
    return match[1] if match else ""
