"""`python -m lmkv_kernels.cuda.build 80 90 100`: compiles the kernels ahead of time, for machines without NVRTC."""

from __future__ import annotations

import argparse
from pathlib import Path

from lmkv_kernels.cuda import images


def main() -> None:
    """Compiles for each architecture of the command line; needs no GPU."""
    parser = argparse.ArgumentParser(prog="python -m lmkv_kernels.cuda.build", description=__doc__)
    parser.add_argument("architectures", nargs="+", type=int, metavar="ARCHITECTURE", help="such as 90 for sm_90")
    parser.add_argument("--into", type=Path, default=images.BUILT_FOLDER, help="folder (default: the package's own)")
    args = parser.parse_args()
    compiler = images.find_compiler()
    for architecture in args.architectures:
        file = args.into / images.file_name(architecture)
        images.write(file, images.compile_kernels(compiler, architecture).image)
        print(f"{file}: by {type(compiler).__name__} {compiler.version}")  # noqa: T201


if __name__ == "__main__":
    main()
