"""Makes an input that breaks a promise smaller: `python -m tests.fuzz.minimise TARGET FILE`. `__main__` starts it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.fuzz.harness import Target, load_target, measure

MAX_RUNS = 3000


def failure(target: Target, data: bytes) -> str:
    """The kind and the place of what an input raises; empty if it raises nothing."""
    try:
        measure(target, data)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {place.filename}:{place.lineno}"
    return ""


def minimise(target: Target, data: bytes) -> bytes:
    """A shorter input with the same failure: parts are removed as long as it stays, larger ones first."""
    wanted, run_count, size = failure(target, data), 0, max(len(data) // 2, 1)
    while wanted and size and run_count < MAX_RUNS:
        at, is_shorter = 0, False
        while at < len(data) and run_count < MAX_RUNS:
            shorter = data[:at] + data[at + size :]
            run_count += 1
            if failure(target, shorter) == wanted:
                data, is_shorter = shorter, True
            else:
                at += size
        if not is_shorter or size > 1:
            size //= 2
    return data


def main(name: str, file: Path) -> None:
    """Writes `FILE.min`, and prints the input and its failure."""
    target = load_target(name)
    data = minimise(target, file.read_bytes())
    file.with_name(f"{file.name}.min").write_bytes(data)
    print(f"{failure(target, data) or 'not reproduced'}: {data!r}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
