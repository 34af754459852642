"""The command line of every benchmark: flags, progress, clean exit, table and JSON."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from benchmarks.support import machine
from benchmarks.support.rows import Report, Row, make_table
from lmkv.errors import LmkvError

INTERRUPTED = 130
WIDTH = 110
"""Columns that a table needs, also where the output is no terminal."""


@dataclass(kw_only=True)
class BenchmarkRun:
    """One run of a benchmark, as its parts see it."""

    args: argparse.Namespace
    report: Report
    folder: Path
    """For models and sockets: short, and gone afterwards."""
    logs: Path
    """For the logs of processes."""
    console: Console = field(default_factory=lambda: Console(highlight=False, width=max(WIDTH, Console().width)))
    started_at: float = field(default_factory=time.monotonic)
    failures: list[str] = field(default_factory=list)
    """Results that must not be published, such as answers that differ."""

    @property
    def quick(self) -> bool:
        """Whether a rough answer soon is better than a good one."""
        return self.report.quick

    def say(self, line: str) -> None:
        """Prints a progress message with the seconds since the start."""
        seconds = time.monotonic() - self.started_at
        self.console.print(f"{seconds:5.1f} s  {line}", soft_wrap=True, markup=False)

    def add(self, *rows: Row) -> None:
        """Adds rows to the report."""
        for row in rows:
            self.report.add(row)

    def note(self, text: str) -> None:
        """Has the report say something that numbers do not."""
        self.report.notes.append(text)
        self.say(text)

    def fail(self, text: str) -> None:
        """Makes the run fail at its end: the table is printed, no JSON is written, and the exit code is 1."""
        self.failures.append(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark: its name, its description and its measurement."""

    name: str
    description: str
    measure: Callable[[BenchmarkRun], None]
    """Adds rows. Raises `LmkvError` if something that it needs does not work."""
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _parser: None

    def parser(self) -> argparse.ArgumentParser:
        """Its command line."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.description)
        parser.add_argument("--quick", action="store_true", help="rough numbers, within three minutes")
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="also write the rows there; to FILE.partial if it fails"
        )
        parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the logs of all processes there")
        self.add_arguments(parser)
        return parser

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs it. Returns the exit code: 0, 1 for a failure, 130 if it was interrupted."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        parser = self.parser()
        args = parser.parse_args(words)
        if args.json and not args.json.absolute().parent.is_dir():
            parser.error(f"--json: there is no folder {args.json.parent}")
        report = Report(
            benchmark=self.name,
            command=shlex.join(["python", "-m", f"benchmarks.{self.name}", *words]),
            quick=args.quick,
            machine=machine.describe(),
        )
        handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        folder = Path(tempfile.mkdtemp(prefix="lmkv-", dir="/tmp"))
        try:
            return self._run(args, report, folder)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, args: argparse.Namespace, report: Report, folder: Path) -> int:
        logs = (args.keep_logs or folder / "logs").absolute()
        run = BenchmarkRun(args=args, report=report, folder=folder, logs=logs)
        try:
            self.measure(run)
        except LmkvError as error:
            run.say(f"failed: {error}")
            for note in getattr(error, "__notes__", ()):
                run.console.print(note, markup=False)
            self._keep_rows(run, f"failed: {error}")
            return 1
        except KeyboardInterrupt:
            run.say("interrupted; everything that was started has ended")
            self._keep_rows(run, "was interrupted")
            return INTERRUPTED
        report.seconds = time.monotonic() - run.started_at
        report.machine["load_average_at_end"] = machine.describe()["load_average"]
        run.console.print(make_table(f"{self.name}, {report.seconds:.0f} s", report.rows))
        for note in report.notes:
            run.console.print(f"- {note}", markup=False)
        for failure in run.failures:
            run.say(f"failed: {failure}")
        if run.failures:
            return 1
        if args.json:
            report.write(args.json)
        return 0

    def _keep_rows(self, run: BenchmarkRun, how: str) -> None:
        """Prints what a run measured that did not come to its end, and writes it beside the file of `--json`."""
        report = run.report
        if not report.rows:
            return
        run.console.print(make_table(f"{self.name}: rows of a run that did not end", report.rows))
        report.notes.append(f"The run {how}.")
        report.seconds = time.monotonic() - run.started_at
        if file := run.args.json:
            report.write(file.with_name(f"{file.name}.partial"))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Ends the run in good order; a second signal does not disturb that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
