"""Compiles kernels with NVRTC, which CUDA builds of torch include, or with nvcc of a CUDA toolkit. Needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lmkv_kernels.cuda.driver import CompileError, NoCompiler

STDINT = "namespace std { using int64_t = long; using uint32_t = unsigned int; using uint64_t = unsigned long; }\n"
"""Replaces `<cstdint>`: NVRTC has no standard headers."""
NVCC_TIMEOUT_SECONDS = 120.0
DEFAULT_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The output of a compiler."""

    image: bytes
    """A cubin, or PTX if the compiler does not know the architecture; the driver loads either."""
    log: str
    """The compiler's log, with registers and spills per kernel."""


class Nvrtc:
    """An NVRTC library. Raises `NoCompiler` if it cannot be loaded."""

    def __init__(self, path: str) -> None:
        try:
            # NVRTC loads these by name only, and finds them if they are loaded already.
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NoCompiler(f"NVRTC at {path} cannot be loaded: {error}") from None
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = path
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def architectures(self) -> tuple[int, ...]:
        """Supported architectures in ascending order, such as 90 for sm_90."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", numbers)
        return tuple(sorted(numbers))

    def compile(self, name: str, source: str, headers: Mapping[str, str], architecture: int) -> Compiled:
        """Compiles for an architecture, or PTX for the newest one known if that is newer.

        Raises `CompileError` with the compiler's output.
        """
        known = self.architectures()
        if architecture in known:
            target = f"sm_{architecture}"
        elif architecture > known[-1]:
            target = f"compute_{known[-1]}"
        else:
            raise CompileError(
                f"NVRTC {self.version} does not compile for sm_{architecture}, only from sm_{known[0]} on"
            )
        options = [f"--gpu-architecture={target}", "--std=c++17", "--ptxas-options=-v"]
        return self._compile(name, source, {"cstdint": STDINT, **headers}, options)

    def _compile(self, name: str, source: str, headers: Mapping[str, str], options: list[str]) -> Compiled:
        program = ctypes.c_void_p()
        self._check(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            name.encode(),
            len(headers),
            _strings(headers.values()),
            _strings(headers),
        )
        try:
            failed = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._text(program, "ProgramLog").decode(errors="replace")
            if failed:
                raise CompileError(f"NVRTC {self.version} cannot compile {name} with {options[0]}: {log.strip()}")
            kind = "CUBIN" if options[0].startswith("--gpu-architecture=sm_") else "PTX"
            return Compiled(image=self._text(program, kind), log=log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, text)
        return text.raw if what == "CUBIN" else text.raw.rstrip(b"\0") + b"\0"

    def _check(self, function: str, *arguments: object) -> None:
        if status := getattr(self._library, function)(*arguments):
            reason = self._library.nvrtcGetErrorString(status).decode()
            raise CompileError(f"{function} of NVRTC at {self.path}: {reason}")


def _strings(texts: object) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)


@cache
def find_nvrtc(newest_major: int | None = None) -> Nvrtc:
    """The installed NVRTC, no newer than the driver's major version if that is given.

    Prefers torch's own, which works for the engine. Raises `NoCompiler` with what to install.
    """
    tried = []
    for path in _candidates():
        major = _major(path)
        if newest_major is not None and major is not None and major > newest_major:
            tried.append(f"{path} is newer than the driver")
            continue
        try:
            return Nvrtc(path)
        except NoCompiler as error:
            tried.append(str(error))
    raise NoCompiler("no NVRTC: " + ("; ".join(tried) or "install nvidia-cuda-nvrtc; torch's CUDA builds bring it"))


def packaged(pattern: str) -> list[Path]:
    """Paths in NVIDIA's packages from PyPI that match a pattern below their common folder."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    return [path for folder in folders for path in sorted(Path(folder).glob(pattern), reverse=True)]


def _candidates() -> Iterator[str]:
    """Paths of libraries, newest first in each location."""
    yield from _newest(packaged("*/lib/libnvrtc.so.*"))
    for home in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        yield from _newest(Path(home, "lib64").glob("libnvrtc.so*"))
    if name := ctypes.util.find_library("nvrtc"):
        yield name


def _newest(files: Iterable[Path]) -> list[str]:
    return [
        str(file) for file in sorted(files, key=lambda file: (_major(file.name) or 0, -len(file.name)), reverse=True)
    ]


def _major(path: str) -> int | None:
    found = re.search(r"\.so\.(\d+)", path)
    return int(found[1]) if found else None


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
            done = subprocess.run(  # noqa: S603 # the path comes from `find_nvcc`
                [self.path, *arguments], capture_output=True, text=True, timeout=NVCC_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"nvcc at {self.path} does not run: {error}") from None
        if done.returncode:
            raise CompileError(f"nvcc at {self.path} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout + done.stderr


def find_nvcc() -> Nvcc:
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
