"""Compiles kernels with nvcc of a CUDA toolkit, ahead of time or instead of NVRTC. Needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lmkv_kernels.cuda.driver import CompileError, NoCompiler
from lmkv_kernels.cuda.nvrtc import Compiled, packaged

TIMEOUT_SECONDS = 120.0
DEFAULT_HOME = Path("/usr/local/cuda")


class Nvcc:
    """An nvcc executable. Raises `NoCompiler` if it does not run."""

    def __init__(self, path: str) -> None:
        self.path = path
        found = re.search(r"release (\d+\.\d+)", self._run("--version"))
        if not found:
            raise NoCompiler(f"{path} is not nvcc")
        self.version = found[1]

    def compile(self, name: str, source: str, headers: Mapping[str, str], architecture: int) -> Compiled:
        """Compiles for an architecture, such as 90 for sm_90. Raises `CompileError` with the compiler's output."""
        with tempfile.TemporaryDirectory(prefix="lmkv-nvcc-") as folder:
            for file, text in {name: source, **headers}.items():
                Path(folder, file).write_text(text)
            target = Path(folder, "image")
            options = ["-cubin", f"-arch=sm_{architecture}", "-std=c++17", "-Xptxas=-v", "-o", str(target)]
            log = self._run(*options, str(Path(folder, name)))
            return Compiled(image=target.read_bytes(), log=log)

    def _run(self, *arguments: str) -> str:
        try:
            done = subprocess.run(  # noqa: S603 # the path comes from `find`
                [self.path, *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"nvcc at {self.path} does not run: {error}") from None
        if done.returncode:
            raise CompileError(f"nvcc at {self.path} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout + done.stderr


def find() -> Nvcc:
    """The nvcc of `CUDA_HOME`, of PATH, of NVIDIA's packages on PyPI, or where CUDA installs it.

    Raises `NoCompiler` if there is none.
    """
    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    installed = [*packaged("*"), DEFAULT_HOME]
    folders = [*(str(home / "bin") for home in homes), None, *(str(home / "bin") for home in installed)]
    for folder in folders:
        if path := shutil.which("nvcc", path=folder):
            return Nvcc(path)
    raise NoCompiler("no nvcc: put it on PATH or set CUDA_HOME; or install NVRTC")
