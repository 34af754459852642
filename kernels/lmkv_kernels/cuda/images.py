"""Compiled kernels: made ahead or at first use, kept per architecture and source, never trusted when damaged."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from lmkv_kernels.cuda import nvcc, nvrtc
from lmkv_kernels.cuda.errors import CompileError, NoCompiler
from lmkv_kernels.cuda.nvrtc import Compiled

NAME = "paged_copy.cu"
HEADERS = ("layout.h",)
BUILT_FOLDER = Path(__file__).with_name("built")
"""Where `python -m lmkv_kernels.cuda.build` puts what it compiles."""
_PACKAGE = Path(__file__).parent.parent
_DIGEST_BYTES = 32


class Compiler(Protocol):
    """What `Nvrtc` and `Nvcc` have in common."""

    path: str
    version: str

    def compile(self, name: str, source: str, headers: dict[str, str], architecture: int) -> Compiled: ...


def source_folder() -> Path:
    """Where the sources are: in the package once installed, beside it in a clone."""
    inside = _PACKAGE / "csrc"
    return inside if inside.exists() else _PACKAGE.parent / "csrc"


def compile_kernels(compiler: Compiler, architecture: int) -> Compiled:
    """The kernels for an architecture, as 90 for sm_90. Raises `CompileError`."""
    folder = source_folder()
    headers = {header: (folder / header).read_text() for header in HEADERS}
    return compiler.compile(NAME, (folder / NAME).read_text(), headers, architecture)


def cache_folder() -> Path:
    """Where kernels compiled at first use are kept, for this user. May not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "lmkv" / "kernels"


def file_name(architecture: int) -> str:
    """The name of a compiled image: another source has another one."""
    return f"paged_copy-{_source_digest()}-sm_{architecture}.image"


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for name in (NAME, *HEADERS):
        text = (source_folder() / name).read_bytes()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


def read(file: Path) -> bytes | None:
    """The image in a file; None if there is none, or not the one that was written."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def write(file: Path, image: bytes) -> None:
    """Puts an image into a file at once: whoever reads it meanwhile finds the old one, or none.

    Raises `OSError` if that cannot be done.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with os.fdopen(fd, "wb") as new:
            os.fchmod(fd, 0o644)  # one user may build for another; the cache's folder is closed to others anyway
            new.write(hashlib.sha256(image).digest() + image)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def find_compiler(driver_major: int | None = None) -> Compiler:
    """NVRTC, else nvcc. Raises `NoCompiler` that says what to install."""
    reasons = []
    finders: tuple[Callable[[], Compiler], ...] = (lambda: nvrtc.find(driver_major), nvcc.find)
    for find in finders:
        try:
            return find()
        except (NoCompiler, CompileError) as error:
            reasons.append(str(error))
    raise NoCompiler("; ".join(reasons))


def load(architecture: int, driver_major: int | None = None) -> bytes:
    """The kernels for an architecture: those made ahead, else the cache's, else compiled now (a second) and cached.

    A cache that cannot be written costs the next process that second, no more. Raises `NoCompiler` or `CompileError`.
    """
    name = file_name(architecture)
    cached = cache_folder() / name
    image = read(BUILT_FOLDER / name) or read(cached)
    if image is None:
        image = compile_kernels(find_compiler(driver_major), architecture).image
        try:
            write(cached, image)
        except OSError:
            pass
    return image


def can_write(folder: Path) -> bool:
    """Whether files could be put into a folder, if need be after it was made."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def forget(architecture: int) -> bool:
    """Drops the cache's image, which the driver would not take. False if there was none."""
    try:
        (cache_folder() / file_name(architecture)).unlink()
    except OSError:
        return False
    return True
