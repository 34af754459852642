"""The packages are what they say: exports, types, entry points, and everything in the wheel."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmkv_kernels.cuda import images

if TYPE_CHECKING:
    from tests.promises.conftest import Run

PACKAGES = {
    "lmkv": "lmkv",
    "lmkv_kernels": "kernels/lmkv_kernels",
    "lmkv_client": "client/lmkv_client",
    "lmkv_server": "server/lmkv_server",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_exactly_what_a_reader_of_the_package_sees(root: Path, package: str) -> None:
    module = importlib.import_module(package)
    exported = getattr(module, "__all__", [])
    assert list(exported) == sorted(exported), "keep __all__ in order"
    assert set(exported) == visible_names(root / PACKAGES[package] / "__init__.py")
    for name in exported:
        assert getattr(module, name) is not None


def visible_names(file: Path) -> set[str]:
    """Public names that an `__init__.py` defines or imports from lmkv's own packages, for type checkers or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def test_the_version_is_that_of_the_distribution(pyproject: dict[str, Any]) -> None:
    assert importlib.import_module("lmkv").__version__ == pyproject["project"]["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed(root: Path, package: str) -> None:
    assert (root / PACKAGES[package] / "py.typed").exists()


def test_every_entry_point_resolves(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = [EntryPoint(name, value, group) for group, named in groups.items() for name, value in named.items()]
    assert len(points) >= 8
    for point in points:
        assert point.load() is not None, point


def test_every_command_goes_by_the_name_of_its_entry_point(pyproject: dict[str, Any]) -> None:
    for name, value in pyproject["project"]["entry-points"]["lmkv.commands"].items():
        assert EntryPoint(name, value, "lmkv.commands").load().name == name


@pytest.mark.timeout(240)
def test_the_wheel_holds_all_four_packages_with_types_stubs_kernels_and_nothing_else(
    root: Path, run: Run, tmp_path: Path
) -> None:
    has_build_tools = all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind"))
    isolation = ["--no-build-isolation"] if has_build_tools else []
    build_dir = f"--config-settings=build-dir={tmp_path / 'build'}"
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", *isolation, build_dir]
    run(*pip, "--wheel-dir", tmp_path, ".", timeout_seconds=200)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    sources = {
        f"{package}/{file.relative_to(root / folder)}"
        for package, folder in PACKAGES.items()
        for file in (root / folder).rglob("*")
        if file.suffix in (".py", ".pyi")
        or file.name == "py.typed"
        or (file.is_file() and file.parent.name == "static")
    }
    assert len(sources) > 50
    assert not sources - held, "missing in the wheel"
    compiled = {name for name in held if name.endswith(".so")}
    assert {name.partition(".")[0] for name in compiled} == {"lmkv_kernels/_host", "lmkv_kernels/_chunk_table"}
    device_sources = {f"lmkv_kernels/csrc/{name}" for name in (images.NAME, *images.HEADERS)}
    assert not device_sources - held, "CUDA could not be compiled at first use"
    own = {name for name in held if not name.startswith("lmkv-")} - compiled - device_sources
    assert not own - sources, "not wanted in the wheel"
    assert any(name.endswith("licenses/LICENSE") for name in held)
