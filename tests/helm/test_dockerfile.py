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
LOCKS = ROOT / "docker" / "locks"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    return {part.split()[2]: part for part in parts}


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_targets_are_the_charts_images_and_their_commands_are_in_them() -> None:
    every: list[Manifest] = [each for case in NAMES for _, pod in pods(manifests_of(case)) for each in containers(pod)]
    programs = {re.sub(r".*/|:.*", "", each["image"]): set[str]() for each in every}
    for each in every:
        programs[re.sub(r".*/|:.*", "", each["image"])].add(each["command"][0])
    assert programs == {"lmkv": {"lmkv"}, "lmkv-node": {"lmkv", "chown", "find"}, "lmkv-vllm": {"vllm", "sh"}}
    assert programs.keys() <= stages().keys()
    assert all(f"make images TARGETS={name} " in DOCKERFILE.read_text() for name in stages() if name.startswith("lmkv"))


def test_images_speak_as_the_charts_user() -> None:
    user = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]["runAsUser"]
    for name in ("base", "lmkv-vllm"):
        assert stages()[name].rindex(f"\nUSER {user}:{user}\n")
        assert f"useradd --uid {user} " in stages()[name]
    for name in ("lmkv", "lmkv-node", "lmkv-vllm-cpu"):
        assert stages()[name].startswith("base AS ")
        users = re.findall(r"^USER (\S+)$", stages()[name], re.MULTILINE)
        assert not users or users[-1] == f"{user}:{user}"


KEEPS_PIP = "lmkv-vllm"
"""The image that keeps pip and the compilers of its base, vLLM's image."""


def test_final_stages_have_no_compiler_and_no_pip_except_vllms() -> None:
    for name in ("base", *targets()):
        assert "BUILD_PACKAGES" not in stages()[name]
        for run in re.findall(r"^RUN (?:.*\\\n)*.*$", stages()[name], re.MULTILINE):
            mounted = "--mount=type=bind,from=build," in run and "PATH=$PATH:/build/venv/bin " in run
            assert "pip install" not in run or mounted != (name == KEEPS_PIP)
    assert "python3 -m venv --without-pip /opt/lmkv" in stages()["base"]
    assert "rm -rf /usr/local/lib/python3*/ensurepip /usr/local/lib/python3*/site-packages/*" in stages()["base"]
    assert stages()[KEEPS_PIP].startswith("${VLLM_IMAGE} AS ")
    assert "apt-get" not in stages()[KEEPS_PIP], "compilers come from its base alone"
    header = " ".join(DOCKERFILE.read_text().partition("ARG ")[0].replace("\n#", "").split())
    assert f"no compiler and no pip, except {KEEPS_PIP}: " in header


def test_images_are_built_again_when_what_they_install_has_changed() -> None:
    assert "sha256sum docker/locks/* scripts/* /build/wheels/* > /build/inputs.sha256" in stages()["build"]
    for name in targets():
        copy, install = (
            stages()[name].index("COPY --from=build /build/inputs.sha256 "),
            stages()[name].index("pip install"),
        )
        assert copy < install, "buildah's cache compares files that are copied, but no mounts"


def test_every_image_describes_itself() -> None:
    for name in targets():
        labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", stages()[name]))
        inherited = set() if name == "lmkv-vllm" else set(re.findall(r"image\.(\w+)=", stages()["base"]))
        assert labels | inherited == {"title", "description", "licenses", "source", "documentation", "vendor"}
        assert f'image.title="{name}"' in stages()[name]


def test_every_image_lists_its_software_once_all_of_it_is_installed() -> None:
    for name in targets():
        runs = re.findall(r"^(?:RUN|COPY) (?:.*\\\n)*.*$", stages()[name], re.MULTILINE)
        assert (
            runs[-1].splitlines()[-1].strip()
            == f"python3 /build/source/scripts/sbom {name} /usr/share/lmkv/sbom.cdx.json"
        )


def targets() -> list[str]:
    """The stages that are images."""
    return [name for name in stages() if name.startswith("lmkv")]


def test_only_vllms_images_have_torch() -> None:
    others = "".join(stages()[name] for name in ("build", "lmkv", "lmkv-node"))
    assert "torch" not in "".join(re.findall(r"pip install.*", others))
    extras = set(re.findall(r"whl\)\[([a-z0-9,]+)\]", others))
    assert extras == {"telemetry,tokenizers,valkey", "encryption,telemetry,valkey,s3,zstd"}
    for name in ("lmkv-vllm-cpu", "lmkv-vllm"):  # an engine may start a node, which needs what a node has
        (its,) = re.findall(r"whl\)\[([a-z0-9,]+)\]", stages()[name])
        assert {"encryption", "telemetry", "valkey", "s3", "zstd"} <= set(its.split(","))
    wanted = [each for names in extras for name in names.split(",") for each in optional(name)]
    assert wanted
    assert not any(re.match("torch|vllm|nixl|lmkv", each) for each in wanted)
    locked = "".join((LOCKS / f"{name}.txt").read_text() for name in ("lmkv", "lmkv-node"))
    assert not re.search(r"^(torch|vllm|nixl)\b", locked, re.MULTILINE)
    assert "--no-deps" in next(line for line in stages()["lmkv-node"].splitlines() if "nixl" in line and "pip" in line)


def test_what_it_pins_is_what_pyproject_takes() -> None:
    tag = re.search(r"^ARG VLLM_IMAGE=\S+/vllm-openai:v(\d+)\.(\d+)\.\d+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert tag
    assert version_error(f"{tag[1]}.{tag[2]}.0") is None
    nixl = re.search(r"^nixl-cu12==(\d+\.\d+)\.", (LOCKS / "nixl.txt").read_text())
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
    own = {name for name in named if Path(name).parts[0] not in packages}
    assert given == packages | own | {"docker/locks", "scripts/sbom", "scripts/vllm-metadata"}
    assert rules[1] == "*"
