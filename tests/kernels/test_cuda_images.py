"""Compiled kernels are cached, by source and architecture, and a damaged cache is as good as none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmkv_kernels.cuda import NoCompiler, compilers, images
from lmkv_kernels.cuda.compilers import Compiled


class Counting:
    """A compiler that counts what it is asked for."""

    path = "counting"
    version = "0.0"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def compile(self, name: str, source: str, headers: dict[str, str], architecture: int) -> Compiled:
        assert "copy_tiles" in source
        assert "word_sum" in headers["layout.h"]
        self.asked.append(architecture)
        return Compiled(image=b"image %d" % architecture, log="")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counting:
    """The only one there is; the cache and the folder of what was built ahead are empty."""
    counting = Counting()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "BUILT_FOLDER", tmp_path / "built")
    monkeypatch.setattr(images, "find_compiler", lambda _major=None: counting)
    return counting


def test_an_architecture_is_compiled_once(compiler: Counting) -> None:
    assert images.load(90) == images.load(90) == b"image 90"
    assert images.load(80) == b"image 80"
    assert compiler.asked == [90, 80]
    assert len(list(images.cache_folder().iterdir())) == 2
    assert images.cache_folder().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 100])
def test_a_damaged_cache_is_recompiled(compiler: Counting, damage: bytes) -> None:
    images.load(90)
    file = images.cache_folder() / images.file_name(90)
    file.write_bytes(damage)
    assert images.load(90) == b"image 90"
    assert compiler.asked == [90, 90]
    assert images.read(file) == b"image 90"


def test_what_the_driver_would_not_take_is_forgotten(compiler: Counting) -> None:
    images.load(90)
    assert images.forget(90)
    assert not images.forget(90)
    images.load(90)
    assert compiler.asked == [90, 90]


def test_a_cache_that_cannot_be_written_is_ignored(compiler: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert images.load(90) == images.load(90) == b"image 90"
    assert compiler.asked == [90, 90]


def test_what_was_built_ahead_is_taken_before_anything_is_compiled(compiler: Counting) -> None:
    images.write(images.BUILT_FOLDER / images.file_name(90), b"ahead")
    assert images.load(90) == b"ahead"
    assert compiler.asked == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    with pytest.raises(OSError, match="image"):
        images.write(tmp_path / "image", b"content")
    assert [file.name for file in tmp_path.iterdir()] == ["image"]


def test_no_compiler_is_one_error_that_names_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "_candidates", lambda: iter(()))
    monkeypatch.setattr(compilers, "packaged", lambda _pattern: [])
    monkeypatch.setattr(compilers, "DEFAULT_HOME", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    compilers.find_nvrtc.cache_clear()
    try:
        with pytest.raises(NoCompiler, match=r"no NVRTC: install nvidia-cuda-nvrtc.*; no nvcc: "):
            images.find_compiler()
    finally:
        compilers.find_nvrtc.cache_clear()


def test_kernels_can_be_built_ahead_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lmkv_kernels.cuda.images", "80", "90", "--into", str(tmp_path)]
    printed = subprocess.check_output(command, text=True, timeout=60, env=os.environ | {"PYTHONPATH": ""})
    files = [tmp_path / images.file_name(architecture) for architecture in (80, 90)]
    assert set(tmp_path.iterdir()) == set(files)
    assert all(str(file) in printed for file in files)
    for file in files:
        image = images.read(file)
        assert image is not None
        assert image.startswith(b"\x7fELF")


def test_a_folder_can_be_written_if_what_leads_to_it_can(tmp_path: Path) -> None:
    assert images.can_write(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    assert not images.can_write(tmp_path / "file" / "b")
