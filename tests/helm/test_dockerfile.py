"""`docker/Dockerfile`: without a fault that hadolint knows, and of one mind with the chart and with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

from lmkv_client.plugin import version_error
from tests.helm.chart import CHART, NAMES, Manifest, containers, manifests_of, pods

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return {part.split()[2]: part for part in parts}


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_targets_are_the_charts_images_and_their_commands_are_in_them() -> None:
    every: list[Manifest] = [each for case in NAMES for _, pod in pods(manifests_of(case)) for each in containers(pod)]
    programs = {re.sub(r".*/|:.*", "", each["image"]): set[str]() for each in every}
    for each in every:
        programs[re.sub(r".*/|:.*", "", each["image"])].add(each["command"][0])
    assert programs == {"lmkv": {"lmkv"}, "lmkv-node": {"lmkv", "chown", "find"}, "lmkv-vllm": {"vllm"}}
    assert programs.keys() <= stages().keys()
    assert all(f"--target {name} " in DOCKERFILE.read_text() for name in programs)


def test_images_speak_as_the_charts_user() -> None:
    user = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]["runAsUser"]
    for name in ("lmkv", "lmkv-vllm"):
        assert f"\nUSER {user}:{user}\n" in stages()[name]
        assert f"useradd --uid {user} " in stages()[name]
    assert stages()["lmkv-node"].startswith("lmkv AS ")


def test_only_vllms_image_has_torch() -> None:
    assert "torch" not in "".join(re.findall(r"pip install.*", DOCKERFILE.read_text()))
    extras = set(re.findall(r"\[([a-z0-9,]+)\]", DOCKERFILE.read_text()))
    assert extras == {"telemetry,tokenizers,valkey", "telemetry,valkey,s3"}
    wanted = [each for names in extras for name in names.split(",") for each in optional(name)]
    assert wanted
    assert not any(re.match("torch|vllm|nixl|lmkv", each) for each in wanted)
    assert "--no-deps" in next(line for line in stages()["build-node"].splitlines() if "nixl" in line and "pip" in line)


def test_what_it_pins_is_what_pyproject_takes() -> None:
    tag = re.match(r"vllm/vllm-openai:v(\d+)\.(\d+)\.\d+ ", stages()["lmkv-vllm"])
    assert tag
    assert version_error(f"{tag[1]}.{tag[2]}.0") is None
    nixl = re.search(r"nixl-cu12==(\d+\.\d+)\.", stages()["build-node"])
    assert nixl
    assert optional("nixl") == [f"nixl-cu12>={nixl[1]}"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == PYPROJECT["project"]["version"]


def optional(name: str) -> list[str]:
    """What an extra installs."""
    wanted: list[str] = PYPROJECT["project"]["optional-dependencies"][name]
    return wanted


def test_the_build_is_given_all_that_the_wheel_is_made_of_and_no_more() -> None:
    rules = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split("\n")
    given = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    packages = {Path(folder).parts[0] for folder in PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()}
    named = {PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"], "pyproject.toml", "CMakeLists.txt"}
    assert given == packages | {name for name in named if Path(name).parts[0] not in packages}
    assert rules[1] == "*"
