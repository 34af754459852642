"""Runs fuzz targets: `make fuzz ARGS="configuration --seconds 60"`. tests/README.md describes it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.harness import ROOT, target_names

OUTPUT = ROOT / "build/fuzz"
PROGRESS_SECONDS = 30.0
_STATUS = re.compile(r"#(?P<runs>\d+)\s.*cov: (?P<edges>\d+).*exec/s: (?P<rate>\d+)")
_RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


@dataclass(kw_only=True)
class Result:
    """What one target found."""

    runs: int = 0
    edges: int = 0
    lines: str = ""
    found: str = ""
    """The minimised input and its failure; empty if there is none."""


def main() -> int:
    """Exits with 1 if an input breaks a promise."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(target_names())}; default: all"
    )
    parser.add_argument("--seconds", type=int, default=3600, help="time for all targets together (default: 3600)")
    parser.add_argument("--keep", action="store_true", help="add inputs with new lines to the committed corpora")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(target_names()):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    targets = args.targets or target_names()
    results = {name: _run(name, max(args.seconds // len(targets), 1), keep=args.keep) for name in targets}
    print(f"\n{'target':24} {'inputs':>10} {'edges':>6}  lines of the covered modules")
    for name, result in results.items():
        print(f"{name:24} {result.runs:>10} {result.edges:>6}  {result.lines}")
    found = {name: result.found for name, result in results.items() if result.found}
    for name, text in found.items():
        print(f"FOUND by {name}: {text}")
    return 1 if found else 0


def _run(name: str, seconds: int, *, keep: bool) -> Result:
    folder = OUTPUT / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "corpus").mkdir(parents=True)
    print(f"{name}: {seconds} s", flush=True)
    result = _fuzz(name, folder, seconds)
    inputs = [file for file in folder.iterdir() if re.match(r"(crash|timeout|oom|leak)-", file.name)]
    for file in inputs:
        result.found = _tool("minimise", name, str(file)) + f" ({file}.min, {folder}/log.txt)"
    if not inputs:
        result.lines = _tool("coverage", name, str(folder), *(["--keep"] if keep else []))
        if not re.match(r"\d+ of", result.lines):  # an input that runs too many lines
            result.found = result.lines
    return result


def _fuzz(name: str, folder: Path, seconds: int) -> Result:
    result, printed = Result(), time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.child", name, str(folder), str(seconds)]
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            log.write(line)
            if status := _STATUS.match(line):
                result.runs, result.edges = int(status["runs"]), int(status["edges"])
                if time.monotonic() - printed > PROGRESS_SECONDS:
                    printed = time.monotonic()
                    print(f"  {result.runs} inputs, {result.edges} edges, {status['rate']}/s", flush=True)
            elif total := _RUNS.match(line):
                result.runs = int(total[1])
    if process.returncode and not any(
        file.name.startswith(("crash-", "timeout-", "oom-")) for file in folder.iterdir()
    ):
        result.found = f"the fuzzer ended with {process.returncode}, see {folder}/log.txt"
    return result


def _tool(module: str, *args: str) -> str:
    """The last line that a tool prints."""
    command = [sys.executable, "-m", f"tests.fuzz.{module}", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stdout if not done.returncode else done.stderr).strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
