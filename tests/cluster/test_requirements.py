"""`make cluster` runs with what its environment has: lmkv, the dependency group `cluster`, and what these need."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

# Its arguments are the modules that cannot be imported.
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import tests.cluster.__main__
"""


def with_dependencies(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name, without extras, and all that they need."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += [Requirement(text) for text in requires(name) or ()]
    return found


def test_it_needs_nothing_else() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = [*settings["project"]["dependencies"], *settings["dependency-groups"]["cluster"]]
    present = {*with_dependencies(required), "lmkv"}
    absent = [
        module
        for module, distributions in packages_distributions().items()
        if module != "tests" and not present & {canonicalize_name(name) for name in distributions}
    ]
    assert {"pytest", "torch", "vllm"} <= set(absent)
    imported = subprocess.run([sys.executable, "-c", PROGRAM, *absent], cwd=ROOT, capture_output=True, text=True)
    assert imported.returncode == 0, f"add it to the group `cluster` of pyproject.toml: {imported.stderr}"
