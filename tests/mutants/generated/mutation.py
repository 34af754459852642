"""Generated mutants: a sample for each module, and those that no test can notice."""

from __future__ import annotations

import difflib
import json
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT

SOURCES = ("", "server", "client", "kernels")
TOOL = ROOT / "build/tools/mutation/bin/python"
"""Python with the dependency group `mutation`; `make mutation` installs it."""
EQUIVALENT_FILE = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedMutant:
    """One change of one module."""

    module: str
    operator: str
    """Cosmic Ray's name of the kind of change."""
    line: int
    source: str
    """The mutated module."""

    def diff(self) -> str:
        """The change, as `diff -U2` shows it."""
        name = str(file_of(self.module).relative_to(ROOT))
        changed = difflib.unified_diff(_lines(self.module), self.source.splitlines(), name, name, lineterm="", n=2)
        return "\n".join(changed)

    def change(self) -> Equivalent:
        """The lines before and after the change, without differences of white space."""
        changed = list(difflib.unified_diff(_lines(self.module), self.source.splitlines(), lineterm="", n=0))[2:]
        was, now = (" ".join(" ".join(one[1:] for one in changed if one[0] == sign).split()) for sign in "-+")
        return Equivalent(module=self.module, was=was, now=now)


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalent:
    """A change that keeps the behaviour."""

    module: str
    was: str
    now: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Mutants of one module."""

    count: int
    """Of all that could be made."""
    mutants: Sequence[GeneratedMutant]


def file_of(module: str) -> Path:
    """The file of a module. Raises `FileNotFoundError` if there is none."""
    for source in SOURCES:
        if (file := ROOT / source / f"{module.replace('.', '/')}.py").is_file():
            return file
    raise FileNotFoundError(f"no module {module}")


def sample(module: str, size: int, seed: int) -> Sample:
    """Makes mutants of a module, the same ones for the same seed and source; all if `size` is 0."""
    made = subprocess.run(
        [
            *(TOOL, "-m", "tests.mutants.generated.operators", file_of(module)),
            *("--sample", str(size), "--seed", f"{seed}:{module}"),
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    read = json.loads(made.stdout)
    mutants = [GeneratedMutant(module=module, **one) for one in read["mutants"]]
    return Sample(count=read["count"], mutants=mutants)


def equivalents() -> dict[Equivalent, str]:
    """The changes that keep the behaviour, each with the reason."""
    listed = tomllib.loads(EQUIVALENT_FILE.read_text(encoding="utf-8")).get("mutant", [])
    return {Equivalent(module=one["module"], was=one["was"], now=one["now"]): one["why"] for one in listed}


def _lines(module: str) -> list[str]:
    return file_of(module).read_text(encoding="utf-8").splitlines()
