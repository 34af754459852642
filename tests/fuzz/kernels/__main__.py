"""Builds the C++ kernels with libFuzzer and sanitizers, and runs them: `make fuzz-kernels ARGS="--seconds 60"`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
SOURCES = ROOT / "kernels/csrc"
OUTPUT = ROOT / "build/fuzz-kernels"
COMPILER = os.environ.get("CLANG", "clang++-19")
FLAGS = ("-std=c++20", "-O1", "-g", f"-I{SOURCES}")
CHECKED = "-fsanitize=fuzzer,address,undefined"


@dataclass(frozen=True, kw_only=True)
class Build:
    """One program: a target, and the kernels that it calls."""

    target: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = (CHECKED, "-fno-sanitize-recover=all")


COPIES = ("chunk_copy", "tile", "transpose")
BUILDS = {
    "token_ids": Build(target="token_ids", sources=("token_ids",)),
    "sha256": Build(target="sha256", sources=("sha256", "chunk_keys")),
    "chunk_table": Build(target="chunk_table", sources=("chunk_table", "chunk_shard", "holder_sets")),
    "copies": Build(target="copies", sources=COPIES),
    "copies_threads": Build(target="copies", sources=COPIES, flags=("-fsanitize=fuzzer,thread", "-DTHREADS")),
}


def main() -> int:
    """Exits with 1 if a program finds something."""
    parser = argparse.ArgumentParser(prog="make fuzz-kernels", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"one of {', '.join(BUILDS)}; default: all")
    parser.add_argument("--seconds", type=int, default=600, help="time for all programs together (default: 600)")
    args = parser.parse_args()
    if unknown := set(args.programs) - BUILDS.keys():
        parser.error(f"no such program: {', '.join(sorted(unknown))}")
    names = args.programs or list(BUILDS)
    return max(_run(name, max(args.seconds // len(names), 1)) for name in names)


def _run(name: str, seconds: int) -> int:
    build, program, corpus = BUILDS[name], OUTPUT / name, OUTPUT / f"{name}-corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    sources = [FOLDER / f"{build.target}.cpp", *(SOURCES / f"{source}.cpp" for source in build.sources)]
    subprocess.run([COMPILER, *FLAGS, *build.flags, "-o", program, *sources], check=True)
    options = [f"-artifact_prefix={program}-", f"-max_total_time={seconds}", "-print_final_stats=1", "-timeout=60"]
    done = subprocess.run(
        [program, corpus, *options], cwd=OUTPUT, capture_output=True, text=True, errors="replace", check=False
    )
    runs = re.findall(r"number_of_executed_units:\s*(\d+)", done.stderr)
    edges = re.findall(r"cov: (\d+)", done.stderr)
    print(f"{name}: {runs[-1] if runs else '?'} inputs, {edges[-1] if edges else '?'} edges in {seconds} s", flush=True)
    if done.returncode:
        print(done.stderr[-5000:])
    return int(bool(done.returncode))


if __name__ == "__main__":
    sys.exit(main())
