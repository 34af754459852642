"""`make images`: what it has Docker and buildah do, with and without a registry."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = "docker.io/library/python:3.12-slim-bookworm"
DIGEST = f"sha256:{'a' * 64}"

PROGRAM = r"""#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"

build() {
    for word; do
        case "$word" in
            id=pip,src=*) while read -r line; do echo "pip.conf $line" >> "$CALLS"; done < "${word#*src=}" ;;
        esac
        [ "$before" = --target ] && target="$word"
        before="$word"
    done
    [ "$target" = "$FAILS" ] && exit 3
    if [ "$target" = "$HANGS" ]; then
        : > "$CALLS.hangs"
        sleep 600
    fi
}

case "$(basename "$0") $*" in
    mmdebstrap*) echo "base of $SOURCE_DATE_EPOCH" >> "$CALLS" ;;
    "docker info") exit $((1 - DAEMON)) ;;
    "docker pull"*|"buildah pull"*) exit $((1 - REGISTRY)) ;;
    "docker image inspect --format {{index"*) echo "python@$DIGEST" ;;
    "docker image inspect --format {{.Size"*) echo 123000000 ;;
    "docker image inspect"*) exit 1 ;;
    *FromImageDigest*) echo "$DIGEST" ;;
    "buildah inspect"*) exit 1 ;;
    "buildah from"*) echo working-container ;;
    "buildah images"*) echo '[{"size": "123 MB"}]' ;;
    "docker build"*|"buildah bud"*) build "$@" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The commands that were run, one a line."""
    return tmp_path / "calls"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that only record their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "buildah", "mmdebstrap"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    for name in ("git", "sh", "basename", "sleep"):  # no other program is found
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (folder / name).symlink_to(found.stdout.strip())
    return folder


def environment(programs: Path, calls: Path, *, daemon: bool = False, registry: bool = False) -> dict[str, str]:
    """The variables of the script: its programs, and what they do."""
    return {
        **{name: text for name, text in os.environ.items() if not name.startswith("PIP_")},
        "PATH": str(programs),
        "CALLS": str(calls),
        "DIGEST": DIGEST,
        "DAEMON": str(int(daemon)),
        "REGISTRY": str(int(registry)),
    }


SCRIPT = (sys.executable, "scripts/images", "--registry", "reg.example/a", "--version", "1.2")


def images(
    programs: Path,
    calls: Path,
    *arguments: str,
    daemon: bool = False,
    registry: bool = False,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    env = {**environment(programs, calls, daemon=daemon, registry=registry), **(variables or {})}
    command = [*SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150, check=False)


def builds(calls: Path) -> dict[str, list[str]]:
    """The arguments of each build by its target."""
    lines = [shlex.split(line) for line in calls.read_text().splitlines()]
    found = [words for words in lines if words[1] in ("build", "bud")]
    return {words[words.index("--target") + 1]: words for words in found}


def pip_config(calls: Path) -> list[str]:
    """The lines of the secret `pip` of a build."""
    lines = calls.read_text().splitlines()
    return [line.removeprefix("pip.conf ") for line in lines if line.startswith("pip.conf ")]


def after(words: list[str], flag: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == flag]


def test_docker_builds_all_images_on_bases_pinned_by_digest(programs: Path, calls: Path) -> None:
    done = images(programs, calls, daemon=True, registry=True)
    assert done.returncode == 0, done.stderr
    built = builds(calls)
    assert list(built) == ["lmkv", "lmkv-node", "lmkv-vllm-cpu", "lmkv-vllm"]
    words = built["lmkv-node"]
    assert words[0] == "docker"
    assert after(words, "--tag") == ["reg.example/a/lmkv-node:1.2"]
    assert f"PYTHON_IMAGE=docker.io/library/python@{DIGEST}" in after(words, "--build-arg")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    labels = dict(pair.split("=", 1) for pair in after(words, "--label"))
    created = labels.pop("org.opencontainers.image.created")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*", created)
    assert {name.removeprefix("org.opencontainers.image."): text for name, text in labels.items()} == {
        "version": "1.2",
        "ref.name": "lmkv-node-1.2",
        "revision": commit.stdout.strip(),
        "base.name": PYTHON,
        "base.digest": DIGEST,
    }
    assert "reg.example/a/lmkv-node:1.2: 123 MB" in done.stdout
    assert any(word.startswith("VLLM_IMAGE=docker.io/vllm/") for word in after(built["lmkv-vllm"], "--build-arg"))


def test_without_docker_and_a_registry_buildah_builds_on_debian_what_it_can(programs: Path, calls: Path) -> None:
    done = images(programs, calls)
    assert done.returncode == 0, done.stderr
    built = builds(calls)
    assert list(built) == ["lmkv", "lmkv-node", "lmkv-vllm-cpu"]
    assert "lmkv-vllm: left out, no registry provides its base docker.io/vllm/vllm-openai:" in done.stdout
    assert "reg.example/a/lmkv:1.2: 123 MB" in done.stdout
    words = built["lmkv"]
    assert words[0] == "buildah"
    assert "PYTHON_IMAGE=localhost/lmkv-base:bookworm" in after(words, "--build-arg")
    assert "--pull=never" in words
    assert after(words, "--ignorefile") == [str(ROOT / "docker" / "Dockerfile.dockerignore")]
    lines = calls.read_text().splitlines()
    (bootstrap,) = (line for line in lines if line.startswith("mmdebstrap"))
    assert "--include=ca-certificates,passwd,python3 " in bootstrap
    assert lines[lines.index(bootstrap) + 1] == "base of 315532800", "the same base from the same packages"
    assert "buildah commit --quiet --timestamp 315532800 working-container localhost/lmkv-base:bookworm" in lines
    assert lines.index(bootstrap) < lines.index("buildah rm working-container"), "made once, and nothing is left"
    assert not any("base.digest" in line for line in lines)


def test_builds_with_buildah_use_this_machines_pip(programs: Path, calls: Path, tmp_path: Path) -> None:
    certificate, packages, wheels = tmp_path / "ca.pem", tmp_path / "packages", tmp_path / "wheels"
    certificate.touch()
    wheels.mkdir()
    variables = {
        "PIP_CERT": str(certificate),
        "PIP_EXTRA_INDEX_URL": f"file://{packages}/simple https://pypi.example/simple",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_CONFIG_FILE": os.devnull,
    }
    done = images(programs, calls, "lmkv", variables=variables)
    assert done.returncode == 0, done.stderr
    words = builds(calls)["lmkv"]
    assert after(words, "--volume") == [f"{path}:{path}:ro" for path in (certificate, packages, wheels)]
    assert pip_config(calls) == [
        "[global]",
        f"cert = {certificate}",
        f"extra-index-url = {variables['PIP_EXTRA_INDEX_URL']}",
        f"find-links = {wheels}",
    ]


def test_builds_with_docker_use_the_indexes_of_this_machines_pip_as_a_secret(programs: Path, calls: Path) -> None:
    password = "https://name:password@pypi.example/simple"
    variables = {"PIP_INDEX_URL": password, "PIP_CERT": "/ca.pem", "PIP_CONFIG_FILE": os.devnull}
    done = images(programs, calls, "lmkv", daemon=True, registry=True, variables=variables)
    assert done.returncode == 0, done.stderr
    assert pip_config(calls) == ["[global]", f"index-url = {password}"]
    assert password not in " ".join(builds(calls)["lmkv"]), "arguments are kept in the image's history"


@pytest.mark.parametrize(
    ("arguments", "variables", "gone", "reason"),
    [
        (["lmkv-vllm"], {}, [], "images: lmkv-vllm: no registry provides its base docker.io/vllm/vllm-openai:v"),
        (["unknown"], {}, [], "images: docker/Dockerfile has no target unknown"),
        ([], {}, ["docker", "buildah"], "images need a running Docker daemon, or buildah: apt-get install buildah"),
        ([], {}, ["mmdebstrap"], "it needs mmdebstrap: apt-get install mmdebstrap"),
        (["--builder", "buildah"], {}, ["buildah"], "images: buildah is not installed"),
        (["lmkv"], {"FAILS": "lmkv"}, [], "images: buildah bud failed with exit code 3"),
    ],
)
def test_what_cannot_be_built_is_reported_with_the_remedy(
    programs: Path, calls: Path, arguments: list[str], variables: dict[str, str], gone: list[str], reason: str
) -> None:
    for name in gone:
        (programs / name).unlink()
    done = images(programs, calls, *arguments, variables=variables)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_build_ends_in_silence_and_leaves_no_file(programs: Path, calls: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**environment(programs, calls), "TMPDIR": str(temporary), "HANGS": "lmkv-node"}
    process = subprocess.Popen(
        SCRIPT, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not Path(f"{calls}.hangs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(list(temporary.glob("lmkv-pip-*"))) == 1
        os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 130
    assert errors == ""
    assert list(temporary.iterdir()) == []


def test_the_tag_of_images_is_the_version_of_the_package() -> None:
    done = subprocess.run(["make", "--silent", "version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] + "\n"
