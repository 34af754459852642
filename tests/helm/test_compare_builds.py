"""`scripts/compare-builds`: what it reports of two builds of an image."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compare-builds"
FIRST_TIME = 315532800

PROGRAM = r"""#!/bin/sh
echo "$(basename "$0") $(cat "$CONTAINERS_STORAGE_CONF" 2>/dev/null | grep graphroot) $*" >> "$CALLS"
case "$*" in
    *FromImageDigest*) echo sha256:0 ;;
    push*)
        for last; do :; done
        count=$(grep -c ' push ' "$CALLS")
        cp "$ARCHIVES/$count.tar" "${last#docker-archive:}" ;;
    "images --json"*) echo '[{"size": "123 MB"}]' ;;
esac
"""


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("compare_builds", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclasses look for it there
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


def layer(files: Mapping[str, bytes], *, seconds: int = FIRST_TIME, mode: int = 0o644) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(content), seconds, mode
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def write_image(archive: Path, layers: Sequence[bytes], **config: object) -> Path:
    """An archive as `buildah push` makes one: a layer that occurs twice is a link."""
    digests = [hashlib.sha256(each).hexdigest() for each in layers]
    described = json.dumps({"rootfs": {"diff_ids": [f"sha256:{each}" for each in digests]}, **config}).encode()
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "Layers": names}]).encode()
    with tarfile.open(archive, "w") as written:
        for name, content in [("config.json", described), ("manifest.json", manifest)]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            written.addfile(member, io.BytesIO(content))
        for name, digest, content in zip(names, digests, layers, strict=True):
            if f"{digest}.tar" not in written.getnames():
                member = tarfile.TarInfo(f"{digest}.tar")
                member.size = len(content)
                written.addfile(member, io.BytesIO(content))
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"../{digest}.tar"
            written.addfile(link)
    return archive


BASE = layer({"etc/passwd": b"root"})


@pytest.mark.parametrize(
    ("second", "reported"),
    [
        (layer({"opt/a": b"1", "opt/b": b"2"}), []),
        (layer({"opt/a": b"1", "opt/b": b"3"}), ["layer 2 of 2: 1 files differ", "  opt/b: content"]),
        (
            layer({"opt/a": b"1", "opt/b": b"2"}, seconds=FIRST_TIME + 1, mode=0o600),
            ["layer 2 of 2: 2 files differ", "  opt/a: mode, time", "  opt/b: mode, time"],
        ),
        (
            layer({"opt/a": b"1", "opt/c": b"2"}),
            [
                "layer 2 of 2: 2 files differ",
                "  opt/b: only in the first build",
                "  opt/c: only in the second build",
            ],
        ),
        (layer({"opt/b": b"2", "opt/a": b"1"}), ["layer 2 of 2: only the order of the files differs"]),
    ],
)
def test_files_that_differ_are_reported_by_layer(
    script: Any, tmp_path: Path, second: bytes, reported: list[str]
) -> None:
    one = write_image(tmp_path / "1.tar", [BASE, layer({"opt/a": b"1", "opt/b": b"2"})])
    other = write_image(tmp_path / "2.tar", [BASE, second])
    assert list(script.differences(script.read_image(one), script.read_image(other))) == reported


def test_configurations_and_numbers_of_layers_that_differ_are_reported(script: Any, tmp_path: Path) -> None:
    one = write_image(tmp_path / "1.tar", [BASE, BASE], created="1980")
    other = write_image(tmp_path / "2.tar", [BASE], created="1981")
    found = list(script.differences(script.read_image(one), script.read_image(other)))
    assert found == ["created: 1980 and 1981", "2 and 1 layers"]


def test_only_the_first_files_of_a_layer_are_shown(script: Any, tmp_path: Path) -> None:
    names = [f"opt/{number:02}" for number in range(30)]
    one, other = (
        write_image(tmp_path / f"{content!r}.tar", [layer(dict.fromkeys(names, content))]) for content in (b"1", b"2")
    )
    found = list(script.differences(script.read_image(one), script.read_image(other)))
    assert found == ["layer 1 of 1: 30 files differ", *(f"  {name}: content" for name in names[:10])]


def compare(folder: Path, archives: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a buildah that records its arguments and has these archives as its builds."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "buildah").write_text(PROGRAM)
    (programs / "buildah").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "ARCHIVES": str(archives),
        "TMPDIR": str(folder),
    }
    command = [sys.executable, str(SCRIPT), "--version", "1.2", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def test_each_build_starts_from_a_storage_of_its_own(tmp_path: Path) -> None:
    for number in (1, 2):
        write_image(tmp_path / f"{number}.tar", [BASE])
    done = compare(tmp_path, tmp_path, "lmkv")
    assert done.returncode == 0, done.stderr
    assert "lmkv: both builds are sha256:" in done.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    storages = [line.split('"')[1] for line in calls if " bud " in line]
    assert len(set(storages)) == 2
    assert all(f'"{storage}"' in line for storage in storages for line in calls if storage in line)
    assert not any(Path(storage).exists() for storage in storages)


def test_builds_that_differ_fail(tmp_path: Path) -> None:
    for number in (1, 2):
        write_image(tmp_path / f"{number}.tar", [layer({"etc/now": str(number).encode()})])
    done = compare(tmp_path, tmp_path, "lmkv")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == ["lmkv: layer 1 of 1: 1 files differ", "lmkv:   etc/now: content"]


def test_an_image_that_cannot_be_built_fails_without_a_traceback(tmp_path: Path) -> None:
    done = compare(tmp_path, tmp_path, "unknown")
    assert done.returncode == 1
    assert "docker/Dockerfile has no target unknown" in done.stderr
    assert "Traceback" not in done.stderr
