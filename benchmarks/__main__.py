"""Runs every benchmark: `python -m benchmarks [--quick] [--only NAME]`, `make benchmarks`."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
NEEDS_GPU = ("engines_gpu", "kernels_gpu")
NEEDS_SGLANG = ("sglang",)
QUICK_SECONDS = 300.0
"""Deadline of one benchmark with `--quick`, which should end within 180 s on an idle machine."""
FULL_SECONDS = 3600.0


def names() -> list[str]:
    """The modules in this folder that define a `Benchmark`."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if "\nBENCHMARK = Benchmark(" in file.read_text())


def main() -> int:
    """Runs them one after the other. Returns the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="rough numbers, within three minutes each")
    parser.add_argument(
        "--only", action="append", choices=names(), metavar="NAME", help="run this one; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="DIR", help="write the rows of each to DIR/NAME.json")
    args = parser.parse_args()
    left_out = (() if _has_gpu() else NEEDS_GPU) + (() if importlib.util.find_spec("sglang") else NEEDS_SGLANG)
    chosen = args.only or [name for name in names() if name not in left_out]
    ends: list[str] = []
    failed_count = 0
    for name in chosen:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--quick"] if args.quick else []
        command += ["--json", str(args.json / f"{name}.json")] if args.json else []
        print(f"== benchmarks.{name}", flush=True)
        started = time.monotonic()
        end = _run(command, QUICK_SECONDS if args.quick else FULL_SECONDS)
        failed_count += end != "ok"
        ends.append(f"{name:16} {end:12} {time.monotonic() - started:6.0f} s")
    print("\n".join(["", "benchmark        end           duration", *ends]))
    return failed_count


def _run(command: list[str], timeout_seconds: float) -> str:
    with subprocess.Popen(command, cwd=FOLDER.parent) as process:
        try:
            code = process.wait(timeout_seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.terminate()  # it stops what it started
            process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            return "too slow"
    return "ok" if code == 0 else f"exit {code}"


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
