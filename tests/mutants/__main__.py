"""Applies the seeded faults of this folder, one at a time, and shows which test catches each: `make mutants`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.copy import Outcome, TreeCopy
from tests.mutants.mutant import Mutant, select

LIMIT_SECONDS = 120.0


def main() -> int:
    """Returns 0 if every mutant was caught, 1 if not, 2 if a test that caught one fails without it, too."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutants, or what their names begin with; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants without running anything")
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", help="run these tests instead of those that a mutant names"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="limit per mutant; default: %(default)g"
    )
    arguments = parser.parse_args()
    try:
        mutants = select(arguments.names)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for one in mutants:
            print(f"{one.name}\n  {one.fault}\n  breaks: {one.promise}\n  model: {one.model}\n  {' '.join(one.tests)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="lmkv-mutants-") as folder:
        copy = TreeCopy(Path(folder))
        copy.make()
        return _run(copy, mutants, arguments.tests, arguments.limit)


def _run(copy: TreeCopy, mutants: Sequence[Mutant], tests: Sequence[str] | None, limit_seconds: float) -> int:
    """Tests each mutant and prints a row for it; returns the exit code."""
    width = max(len(one.name) for one in mutants)
    print(f"{'mutant':{width}}  seconds  caught by", flush=True)
    caught: list[str] = []
    for one in mutants:
        began = time.monotonic()
        if not copy.apply(one):
            print(f"{one.name:{width}}  {'':7}  NOT APPLIED: make the patch again", flush=True)
            continue
        outcome = copy.test(tests or one.tests, limit_seconds)
        if not copy.apply(one, reverse=True):
            raise RuntimeError(f"{one.name} cannot be removed from the copy")
        if outcome.test:
            caught.append(outcome.test)
        shown = outcome.test or f"SURVIVED: {outcome.problem or 'no test failed'}"
        print(f"{one.name:{width}}  {time.monotonic() - began:7.1f}  {shown}", flush=True)
        if outcome.problem:
            print(outcome.output[-2000:], flush=True)
    print(f"\n{len(caught)} of {len(mutants)} caught")
    clean = copy.test(sorted(set(caught)), limit_seconds * len(caught)) if caught else Outcome(test="")
    if clean.test or clean.problem:
        print(clean.output, f"without a mutant fails, too: {clean.test or clean.problem}", sep="\n")
        return 2
    return 0 if len(caught) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
