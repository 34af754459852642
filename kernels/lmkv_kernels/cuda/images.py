"""Compiled kernels: built ahead of time or on first use, stored per architecture and source with a checksum.

`python -m lmkv_kernels.cuda.images 80 90 100` compiles them ahead of time, for machines without NVRTC.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from lmkv_kernels.cuda import compilers
from lmkv_kernels.cuda.compilers import Compiled
from lmkv_kernels.cuda.driver import CompileError, NoCompiler

NAME = "paged_copy.cu"
HEADERS = ("layout.h",)
BUILT_FOLDER = Path(__file__).with_name("built")
"""Output folder of `python -m lmkv_kernels.cuda.images`."""
_PACKAGE = Path(__file__).parent.parent
_DIGEST_BYTES = 32


class Compiler(Protocol):
    """A compiler: `Nvrtc` or `Nvcc`."""

    path: str
    version: str

    def compile(self, name: str, source: str, headers: dict[str, str], architecture: int) -> Compiled: ...


def source_folder() -> Path:
    """Folder of the sources: inside an installed package, beside it in a clone."""
    inside = _PACKAGE / "csrc"
    return inside if inside.exists() else _PACKAGE.parent / "csrc"


def compile_kernels(compiler: Compiler, architecture: int) -> Compiled:
    """Compiles for an architecture, such as 90 for sm_90. Raises `CompileError`."""
    folder = source_folder()
    headers = {header: (folder / header).read_text() for header in HEADERS}
    return compiler.compile(NAME, (folder / NAME).read_text(), headers, architecture)


def cache_folder() -> Path:
    """This user's cache of kernels compiled on first use. May not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "lmkv" / "kernels"


def file_name(architecture: int) -> str:
    """File name of a compiled image; contains a digest of the source."""
    return f"paged_copy-{_source_digest()}-sm_{architecture}.image"


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for name in (NAME, *HEADERS):
        text = (source_folder() / name).read_bytes()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:16]


def read(file: Path) -> bytes | None:
    """Reads an image; None if the file does not exist or is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def write(file: Path, image: bytes) -> None:
    """Writes an image atomically. Raises `OSError` if it cannot."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
    try:
        with os.fdopen(fd, "wb") as new:
            os.fchmod(fd, 0o644)  # other users may read a build; the cache's folder is private
            new.write(hashlib.sha256(image).digest() + image)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def find_compiler(driver_major: int | None = None) -> Compiler:
    """NVRTC, else nvcc. Raises `NoCompiler` with what to install."""
    reasons = []
    finders: tuple[Callable[[], Compiler], ...] = (
        lambda: compilers.find_nvrtc(driver_major),
        compilers.find_nvcc,
    )
    for find in finders:
        try:
            return find()
        except (NoCompiler, CompileError) as error:
            reasons.append(str(error))
    raise NoCompiler("; ".join(reasons))


def load(architecture: int, driver_major: int | None = None) -> bytes:
    """The kernels for an architecture: built ahead of time, else cached, else compiled now (in a second) and cached.

    Ignores errors of writing the cache. Raises `NoCompiler` or `CompileError`.
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
    """Whether files can be written to a folder, possibly after creating it."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def forget(architecture: int) -> bool:
    """Removes an image that the driver rejected from the cache. Returns False if there was none."""
    try:
        (cache_folder() / file_name(architecture)).unlink()
    except OSError:
        return False
    return True


def main() -> None:
    """Compiles for each architecture of the command line; needs no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m lmkv_kernels.cuda.images",
        description="Compiles the kernels ahead of time, for machines without NVRTC.",
    )
    parser.add_argument("architectures", nargs="+", type=int, metavar="ARCHITECTURE", help="such as 90 for sm_90")
    parser.add_argument("--into", type=Path, default=BUILT_FOLDER, help="folder (default: the package's own)")
    args = parser.parse_args()
    compiler = find_compiler()
    for architecture in args.architectures:
        file = args.into / file_name(architecture)
        write(file, compile_kernels(compiler, architecture).image)
        print(f"{file}: by {type(compiler).__name__} {compiler.version}")  # noqa: T201


if __name__ == "__main__":
    main()
