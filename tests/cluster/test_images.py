"""The images of cases: which they are, what must not be in them, and builds that fail or are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from tests.cluster import __main__ as cluster
from tests.cluster import images
from tests.cluster.__main__ import Images, Results, images_of
from tests.cluster.cases import CASES
from tests.cluster.contents import PACKAGES, SBOM, component_count, installers
from tests.cluster.images import ImageError, build, parts


def write(root: Path, name: str, *, text: str = "", mode: int = 0o755) -> str:
    """Adds a file; returns its path."""
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def wait_until_gone(pid: int, deadline: float) -> None:
    """Waits until a process has ended; a zombie has ended, too."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path("/proc", str(pid), "cmdline").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_only_cases_with_engines_need_an_engines_image() -> None:
    assert [parts(each)[1] for each in images_of([CASES["nodes"], CASES["policies"]], "a.example/b")] == [
        "lmkv",
        "lmkv-node",
    ]
    both = images_of([CASES["nodes"], CASES["default"]], "a.example/b")
    assert [parts(each)[:2] for each in both] == [
        ("a.example/b", name) for name in ("lmkv", "lmkv-node", "lmkv-vllm-cpu")
    ]


def test_compilers_build_tools_and_installers_are_found_anywhere(tmp_path: Path) -> None:
    names = ("usr/bin/x86_64-linux-gnu-gcc-12", "usr/lib/gcc/12/cc1plus", "usr/bin/g++", "opt/bin/pip3.11", "bin/make")
    expected = {write(tmp_path, name) for name in (*names, "usr/bin/ld", "usr/bin/ld.bfd", "usr/bin/as")}
    (tmp_path / "usr/bin/cc").symlink_to("x86_64-linux-gnu-gcc-12")
    expected.add(str(tmp_path / "usr/bin/cc"))
    for name in PACKAGES:
        expected.add(str(Path(write(tmp_path, f"opt/lib/python3.11/site-packages/{name}/__init__.py")).parent))
    assert set(installers(tmp_path)) == expected


def test_other_files_are_no_compilers(tmp_path: Path) -> None:
    for name in ("usr/bin/python3", "lib64/ld-linux-x86-64.so.2", "usr/bin/ld.so", "usr/bin/gzip", "dev/make"):
        write(tmp_path, name)
    write(tmp_path, "usr/share/bash-completion/make", mode=0o644)
    write(tmp_path, "var/pip/readme")
    (tmp_path / "usr/bin/cc").symlink_to("nowhere")
    assert list(installers(tmp_path)) == []


@pytest.mark.parametrize("listed", [{}, {"bomFormat": "CycloneDX", "components": []}, {"components": [{}]}])
def test_an_empty_list_of_software_is_an_error(tmp_path: Path, listed: object) -> None:
    write(tmp_path, SBOM, text=json.dumps(listed))
    with pytest.raises(ValueError, match="lists no software"):
        component_count(tmp_path)


def test_components_are_counted(tmp_path: Path) -> None:
    write(tmp_path, SBOM, text=json.dumps({"bomFormat": "CycloneDX", "components": [{}, {}]}))
    assert component_count(tmp_path) == 2


async def test_a_build_that_fails_is_reported_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    log = tmp_path / "logs" / "build.log"
    with pytest.raises(ImageError, match=r"exit code 1; 'images: buildah is not installed' is the end of .*build\.log"):
        await build("localhost/none/lmkv:0", log)


async def test_a_build_that_is_stopped_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "bin/buildah", text=f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    task = asyncio.create_task(build("localhost/none/lmkv:0", tmp_path / "build.log"))
    pid, deadline = tmp_path / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_gone, int(pid.read_text()), deadline)


NAMED = ["localhost/none/lmkv:0", "localhost/none/lmkv-vllm-cpu:0"]


async def test_cases_without_engines_wait_for_no_engines_image(monkeypatch: pytest.MonkeyPatch) -> None:
    built, may_end = [], asyncio.Event()

    async def build(image: str, _: Path) -> None:
        """A stand-in for buildah, which takes minutes."""
        if image == NAMED[1]:
            await may_end.wait()
        built.append(image)

    async def check_contents(_: str) -> str:
        return "checked"

    monkeypatch.setattr(cluster, "build", build)
    monkeypatch.setattr(cluster, "check_contents", check_contents)
    results: Results = {}
    async with asyncio.timeout(10), Images(NAMED, results, builds=True) as prepared:
        assert await prepared.wait(NAMED[:1])
        assert built == NAMED[:1]
        may_end.set()
        assert await prepared.wait(NAMED)
    assert built == NAMED
    assert results == {("images", "lmkv"): "0 s, checked", ("images", "lmkv-vllm-cpu"): "0 s"}


async def test_after_a_build_that_fails_no_case_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cluster, "logs_folder", lambda name: tmp_path / name)
    results: Results = {}
    async with asyncio.timeout(60), Images(NAMED, results, builds=True) as prepared:
        assert not await prepared.wait(NAMED[1:])
    assert set(results) == {("images", "lmkv")}
    assert results["images", "lmkv"].startswith("FAILED: exit code 1; 'images: buildah is not installed'")


def test_the_program_in_images_needs_no_other_module() -> None:
    assert "from tests" not in images.PROGRAM
    assert "import lmkv" not in images.PROGRAM
