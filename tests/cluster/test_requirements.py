"""`make cluster` runs with what its environment has: lmkv with tokenizers, the group `cluster`, and what they need."""

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

# The first argument is a folder for a model, the others are the modules that cannot be imported.
PROGRAM = """
import pathlib, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
from tests.cluster.__main__ import CASES, manifests_of
from tests.cluster.fleet import make_model
for case in CASES.values():
    manifests_of(case, "registry")
make_model(pathlib.Path(sys.argv[1]) / "model")
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


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    extra = project["optional-dependencies"]["tokenizers"]
    required = [*project["dependencies"], *extra, *settings["dependency-groups"]["chart"]]
    present = {*with_dependencies(required), "lmkv"}
    absent = [
        module
        for module, distributions in packages_distributions().items()
        if module != "tests" and not present & {canonicalize_name(name) for name in distributions}
    ]
    assert {"pytest", "torch", "vllm"} <= set(absent)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *absent]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, f"add it to the group `chart` of pyproject.toml: {ran.stderr}"
