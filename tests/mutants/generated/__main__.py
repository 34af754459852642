"""Changes pure modules of lmkv at random places, one at a time, and shows the changes that no test notices.

`make mutation ARGS="--module lmkv.keys --sample 100"` runs it; tests/README.md describes it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping

from tests.mutants.generated.cores import CORES
from tests.mutants.generated.mutation import Equivalent, equivalents, sample
from tests.mutants.generated.runner import preload, run, run_all

SAMPLE, MINIMUM = 40, 90.0
TESTS_SECONDS = 60.0
"""Limit of a module's tests without a mutant, with the default slowdown."""
SLOWDOWN, MARGIN_SECONDS = 5.0, 5.0
"""Default limit with a mutant: that many times longer than without, and a margin for imports."""


def main() -> int:
    """Returns 0 if the score of each module is high enough, 1 if not, 2 if a module's tests fail without a mutant."""
    parser = argparse.ArgumentParser(prog="make mutation", description=__doc__)
    add = parser.add_argument
    add("--module", nargs="+", default=[""], metavar="NAME", help="modules, or packages; default: all")
    add("--sample", type=int, default=SAMPLE, metavar="COUNT", help="mutants per module, 0: all; default: %(default)s")
    add("--seed", type=int, default=0, help="another seed selects other mutants; default: %(default)s")
    add("--minimum", type=float, default=MINIMUM, metavar="PERCENT", help="lowest score; default: %(default)s")
    add(
        "--slowdown",
        type=float,
        default=SLOWDOWN,
        metavar="FACTOR",
        help="limit of a mutant's tests in multiples of their time without it: raise it on a busy host, "
        "where a mutant may exceed the limit because of the host; default: %(default)s",
    )
    add("--jobs", type=int, default=1, help="mutants tested at a time; default: %(default)s")
    add("--list", action="store_true", help="list the modules and their tests")
    arguments = parser.parse_args()
    names = tuple(arguments.module)
    modules = [name for name in CORES if f"{name}.".startswith(tuple(f"{one}." if one else "" for one in names))]
    if not modules:
        parser.error(f"no pure module is named {' or '.join(names)}; --list shows them")
    if arguments.list:
        for name in modules:
            print(f"{name}\n  {' '.join(CORES[name])}")
        return 0
    width = max(map(len, modules))
    print(f"{'module':{width}}  mutants  sampled  killed  timeout  equivalent  survived  score  seconds", flush=True)
    known = equivalents()
    status = 0
    for name in modules:
        score = _score(name, arguments, known, width)
        status = max(status, 2 if score is None else int(score < arguments.minimum))
    return status


def _score(module: str, arguments: argparse.Namespace, known: Mapping[Equivalent, str], width: int) -> float | None:
    """Tests a sample of a module's mutants and prints a row; returns the score in percent, None without one."""
    began = time.monotonic()
    tests = CORES[module]
    clean = run(tests, TESTS_SECONDS * arguments.slowdown / SLOWDOWN)
    if clean.caught_by:
        print(f"{module:{width}}  without a mutant: {clean.caught_by}\n{clean.output[-2000:]}", flush=True)
        return None
    preload(clean.imported)
    made = sample(module, arguments.sample, arguments.seed)
    mutants = [one for one in made.mutants if one.change() not in known]
    results, survivors = Counter[str](), []
    limit = clean.seconds * arguments.slowdown + MARGIN_SECONDS
    for mutant, result in run_all(mutants, tests, limit, arguments.jobs):
        results["timeout" if result.caught_by == "timeout" else "killed" if result.caught_by else "survived"] += 1
        if not result.caught_by:
            survivors.append(mutant)
    score = 100 * (len(mutants) - len(survivors)) / len(mutants) if mutants else 100.0
    print(
        f"{module:{width}}  {made.count:7}  {len(made.mutants):7}  {results['killed']:6}  {results['timeout']:7}"
        f"  {len(made.mutants) - len(mutants):10}  {len(survivors):8}  {score:4.0f}%  {time.monotonic() - began:7.1f}",
        flush=True,
    )
    for mutant in sorted(survivors, key=lambda one: one.line):
        print(f"\nSURVIVED: {mutant.operator}\n{mutant.diff()}\n", flush=True)
    return score


if __name__ == "__main__":
    sys.exit(main())
