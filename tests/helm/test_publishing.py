"""`make images-publish`, `make chart-publish` and `make release-publish`, with a registry of this host."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helm.registry import Registry, registry

ROOT = Path(__file__).parents[2]
VERSION = "0.1.0"


@pytest.fixture
def server() -> Iterator[Registry]:
    with registry() as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a user without any credentials; images are kept in a folder of the test."""
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path / "images"}"\nrunroot = "{tmp_path / "run"}"\n'
    )
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text("{}")
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "DOCKER_CONFIG": str(tmp_path / ".docker"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "outputs"),
        "CONTAINERS_STORAGE_CONF": str(tmp_path / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(tmp_path / "registries.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }


def run(*command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150, check=False)


def outputs(environment: dict[str, str]) -> dict[str, str]:
    """The outputs of a workflow's step."""
    lines = Path(environment["GITHUB_OUTPUT"]).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def show_and_push(command: Sequence[str | Path], server: Registry, environment: dict[str, str], tmp_path: Path) -> str:
    """Publishes: a dry run, whose output is returned, and a run without credentials push nothing; then it has them."""
    shown = run(*command, "--dry-run", env=environment)
    assert (shown.returncode, server.held) == (0, {}), shown.stderr
    refused = run(*command, env=environment)
    assert (refused.returncode, server.held) == (1, {})
    assert f"docker login {server.address}" in refused.stderr
    server.log_in(tmp_path / ".docker")
    done = run(*command, env=environment)
    assert done.returncode == 0, done.stderr
    return shown.stdout


def test_a_chart_is_pushed_with_the_credentials_of_docker(
    server: Registry, environment: dict[str, str], tmp_path: Path
) -> None:
    chart = (sys.executable, "scripts/chart", "--dist", tmp_path / "dist")
    publish = (*chart, "--publish", f"oci://{server.address}/charts", "--version", VERSION, "--plain-http")
    done = run(*publish, env=environment)
    assert (done.returncode, server.held) == (1, {})
    assert f"there is no {tmp_path}/dist/lmkv-{VERSION}.tgz; run: make chart" in done.stderr
    assert run(*chart, env=environment).returncode == 0
    shown = show_and_push(publish, server, environment, tmp_path)
    assert f"oci://{server.address}/charts/lmkv:{VERSION}: would be pushed" in shown
    assert outputs(environment) == {"chart": server.digest("charts/lmkv", VERSION)}
    manifest = json.loads(server.held[f"/v2/charts/lmkv/manifests/{VERSION}"][0])
    (layer,) = manifest["layers"]
    package = tmp_path / "dist" / f"lmkv-{VERSION}.tgz"
    assert server.held[f"/v2/charts/lmkv/blobs/{layer['digest']}"][0] == package.read_bytes()


@pytest.mark.skipif(not shutil.which("buildah") or os.geteuid() != 0, reason="needs root and buildah")
def test_images_that_are_built_are_pushed(server: Registry, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{server.address}"\ninsecure = true\n')
    script = (sys.executable, "scripts/images", "--builder", "buildah", "--registry", f"{server.address}/a")
    publish = (*script, "--version", VERSION, "--publish")
    done = run(*publish, "lmkv", env=environment)
    assert done.returncode == 1
    assert f'not built: lmkv; run: make images IMAGES={server.address}/a TARGETS="lmkv"' in done.stderr
    container = run("buildah", "from", "scratch", env=environment).stdout.strip()
    done = run("buildah", "commit", "--rm", container, f"{server.address}/a/lmkv:{VERSION}", env=environment)
    assert done.returncode == 0, done.stderr
    shown = show_and_push(publish, server, environment, tmp_path)
    assert f"{server.address}/a/lmkv:{VERSION}: would be pushed" in shown
    assert f"{server.address}/a/lmkv-node:{VERSION}: left out, it is not built" in shown
    assert outputs(environment) == {"lmkv": server.digest("a/lmkv", VERSION)}


GH = """#!/bin/sh
case "$1" in
    auth) exit "$REFUSED" ;;
    *) printf '%s\\n' "$@" >"$CALL" ;;
esac
"""
"""Records its arguments: the program itself talks to GitHub only."""


def test_a_release_has_all_files_of_its_version_and_no_other(environment: dict[str, str], tmp_path: Path) -> None:
    programs, dist = tmp_path / "bin", tmp_path / "dist"
    programs.mkdir()
    env = environment | {"PATH": str(programs), "CALL": str(tmp_path / "call"), "REFUSED": "1"}
    command = (sys.executable, "scripts/release", "--version", VERSION, "--dist", dist)
    names = [f"lmkv-{VERSION}-cp311-cp311-manylinux_2_28_x86_64.whl", f"lmkv-{VERSION}.tar.gz", f"lmkv-{VERSION}.tgz"]
    dist.mkdir()
    for name, target in zip(names, ("wheels", "sdist", "chart"), strict=True):
        assert f"run: make {target}" in run(*command, env=env).stderr
        (dist / name).touch()
    (dist / "lmkv.spdx.json").touch()
    (dist / "lmkv-0.0.9.tgz").touch()
    assert "files of another version; remove them: lmkv-0.0.9.tgz" in run(*command, env=env).stderr
    (dist / "lmkv-0.0.9.tgz").unlink()
    expected = ["gh", "release", "create", f"v{VERSION}", "--verify-tag", "--generate-notes"]
    expected += [str(dist / name) for name in sorted([*names, "lmkv.spdx.json"])]
    assert shlex.split(run(*command, "--dry-run", env=env).stdout) == expected
    assert "gh is not installed" in run(*command, env=env).stderr
    (programs / "gh").write_text(GH)
    (programs / "gh").chmod(0o755)
    assert "gh has no credentials; run: gh auth login" in run(*command, env=env).stderr
    done = run(*command, env=env | {"REFUSED": "0"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "call").read_text().splitlines() == expected[1:]
