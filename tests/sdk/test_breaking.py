"""Breaking changes of the protos are reported, against the newest tag, once there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lmkv.internal import PROTOCOL_VERSION
from tests.sdk.buf import ROOT, find_buf

TIMEOUT_SECONDS = 300.0
PUBLIC = "protos/lmkv/v1/registry_service.proto"
INTERNAL = "protos/lmkv/internal/v1/report_service.proto"
PROTOCOL = "lmkv/internal/__init__.py"
FIELD = "  string next_page_token = 2;\n"

pytestmark = pytest.mark.timeout(600)  # on a busy host

Git = Callable[..., None]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with our protos and without tags."""
    for name in ("protos", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / PROTOCOL).parent.mkdir(parents=True)
    shutil.copy(ROOT / PROTOCOL, tmp_path / PROTOCOL)
    return tmp_path


@pytest.fixture
def git(clone: Path) -> Git:
    """Runs git in the repository."""
    mine = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]

    def run(*arguments: str) -> None:
        subprocess.run(["git", *mine, *arguments], cwd=clone, check=True, timeout=TIMEOUT_SECONDS, capture_output=True)

    run("init", "--quiet")
    return run


def breaking(clone: Path) -> tuple[int, str]:
    """The exit code of `scripts/breaking`, and what it says."""
    done = subprocess.run(
        ["scripts/breaking"],
        cwd=clone,
        env=os.environ | {"BUF": find_buf()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    return done.returncode, done.stdout


def change(clone: Path, old: str, new: str, file: str = PUBLIC) -> None:
    """Replaces a text once in a file."""
    path = clone / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_nothing_is_broken_now() -> None:
    code, said = breaking(ROOT)
    assert code == 0, said


@pytest.mark.usefixtures("git")
def test_until_there_is_a_tag_everything_may_change(clone: Path) -> None:
    change(clone, FIELD, "")
    assert breaking(clone) == (0, "no release is tagged yet: the protos may change\n")


def test_then_clients_of_the_newest_tag_are_understood(clone: Path, git: Git) -> None:
    for version, addition in (("v0.9.0", ""), ("v0.10.0", "  string added = 60;\n")):  # in the order of versions
        change(clone, FIELD, FIELD + addition)
        git("add", "--all")
        git("commit", "--quiet", "--allow-empty", "--message", version)
        git("tag", version)
    code, said = breaking(clone)
    assert (code, said) == (0, "comparing the protos with .git#tag=v0.10.0,subdir=protos\n")
    change(clone, FIELD, FIELD + "  string later = 61;\n")
    assert breaking(clone)[0] == 0
    change(clone, "  string added = 60;\n", "  string added = 62;\n")
    code, said = breaking(clone)
    assert code != 0
    assert 'field "60" with name "added"' in said


def test_what_coordinators_and_nodes_say_to_each_other_may_change_with_its_version(clone: Path, git: Git) -> None:
    git("add", "--all")
    git("commit", "--quiet", "--message", "v0.9.0")
    git("tag", "v0.9.0")
    assert breaking(clone)[0] == 0
    change(clone, "  bool snapshot_end = 5 [(google.api.field_behavior) = OPTIONAL];\n", "", INTERNAL)
    code, said = breaking(clone)
    assert code != 0
    assert said.endswith(
        f"nodes of v0.9.0 would misunderstand lmkv.internal.v1: raise PROTOCOL_VERSION in {PROTOCOL}\n"
    )
    version = f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n"
    change(clone, version, f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\n", PROTOCOL)
    assert breaking(clone)[0] == 0
