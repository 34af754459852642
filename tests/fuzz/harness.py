"""Finds fuzz targets, runs one input, and measures its work: `tests/README.md`.

A target is a module of `tests/fuzz/targets` with `run(data)`, which raises if a promise is broken, `SEEDS`, which are
valid inputs, and `COVERS`, the modules whose lines count as its coverage.
"""

from __future__ import annotations

import ast
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tests.fuzz.promises import no_unexpected_failures

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
OWN_PACKAGES = ("lmkv", "lmkv_server", "lmkv_client", "lmkv_kernels")
MAX_INPUT_BYTES = 4096
MAX_LINES, LINES_PER_BYTE = 60_000, 400
"""Lines of lmkv's code that may be run for one input."""
FOUND = "# Found by the fuzzer, one input for each new line of code:"


class TooMuchWork(AssertionError):
    """An input makes lmkv run more lines than `MAX_LINES` and `LINES_PER_BYTE` allow."""


@dataclass(frozen=True, kw_only=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    covers: Sequence[str]

    @property
    def corpus_file(self) -> Path:
        """Where its inputs are."""
        return FOLDER / "corpus" / f"{self.name}.txt"

    def corpus(self) -> list[bytes]:
        """The committed inputs, the seeds first."""
        return [*self.seeds, *read_corpus(self.corpus_file)]


def target_names() -> list[str]:
    return sorted(file.stem for file in (FOLDER / "targets").glob("*.py"))


def load_target(name: str) -> Target:
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    return Target(name=name, run=_guarded(module), seeds=module.SEEDS, covers=module.COVERS)


def _guarded(module: ModuleType) -> Callable[[bytes], None]:
    run: Callable[[bytes], None] = module.run

    def guarded(data: bytes) -> None:
        with no_unexpected_failures():
            run(data)

    return guarded


def read_corpus(file: Path) -> list[bytes]:
    """The inputs in a file: one literal of Python each line, and comments."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [ast.literal_eval(line) for line in lines if line and not line.startswith("#")]


def mutants(corpus: Sequence[bytes], count: int, seed: str) -> Iterator[bytes]:
    """Changed inputs, always the same for a seed."""
    source = random.Random(seed)
    for _ in range(count):
        data = bytearray(source.choice(corpus))
        for _ in range(source.randrange(1, 5)):
            at = source.randrange(len(data) + 1)
            act = source.randrange(6)
            if act == 0:
                data[at : at + 1] = bytes([source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))])
            elif act == 1:
                del data[at : at + source.randrange(1, 9)]
            elif act == 2:
                data[at:at] = source.randbytes(source.randrange(1, 9))
            elif act == 3:
                other = source.choice(corpus)
                data[at:] = other[source.randrange(len(other) + 1) :]
            elif act == 4:
                data[at:at] = data[at : at + source.randrange(1, 33)]
            else:
                data[at : at + 1] = bytes(byte ^ 1 << source.randrange(8) for byte in data[at : at + 1])
        yield bytes(data[:MAX_INPUT_BYTES])


Line = tuple[str, int]


class LineTrace:
    """Counts the lines of lmkv's code that run in this context, and remembers those of modules that a target covers.

    Raises `TooMuchWork` in the traced code beyond the limit.
    """

    def __init__(self, covers: Sequence[str], limit: int) -> None:
        self.covered: set[Line] = set()
        self.count = 0
        self._limit = limit
        self._covers = tuple(covers)
        self._kinds: dict[str, int] = {}

    def __enter__(self) -> LineTrace:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        kind = self._kinds.get(file)
        if kind is None:
            module = frame.f_globals.get("__name__", "")
            is_own = module.partition(".")[0] in OWN_PACKAGES
            kind = self._kinds[file] = is_own + module.startswith(self._covers)
        return (self._count_line, self._note_line)[kind - 1] if kind else None

    def _count_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count > self._limit:
                raise TooMuchWork(f"more than {self._limit} lines")
        return self._count_line

    def _note_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.covered.add((frame.f_code.co_filename, frame.f_lineno))
        self._count_line(frame, event, argument)
        return self._note_line


def measure(target: Target, data: bytes) -> set[Line]:
    """Runs an input and returns the lines that it covers. Raises what a broken promise raises, and `TooMuchWork`."""
    with LineTrace(target.covers, MAX_LINES + LINES_PER_BYTE * len(data)) as trace:
        target.run(data)
    return trace.covered


def code_lines(covers: Sequence[str]) -> set[Line]:
    """All lines of the functions of these modules."""
    lines: set[Line] = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not name.startswith(tuple(covers)) or not file or not file.endswith(".py") or "_pb2" in file:
            continue
        pending: list[Any] = list(compile(Path(file).read_text(), file, "exec").co_consts)
        while pending:
            code = pending.pop()
            if hasattr(code, "co_lines"):
                pending += code.co_consts
                if code.co_flags & 2:  # a function, not the body of a class
                    lines |= {(file, line) for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
    return lines
