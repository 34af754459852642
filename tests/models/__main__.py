"""Explores all models as deep as a time allows, and prints how far: `python -m tests.models --seconds 60 pool`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.models.explorer import explore
from tests.models.models import MODELS

UNLIMITED = 1 << 30


def main() -> int:
    """Returns 1 if a model breaks a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="per model")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of: {', '.join(MODELS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - MODELS.keys():
        parser.error(f"no models: {', '.join(sorted(unknown))}")
    failed = False
    print(f"{'model':28}{'depth':>6}{'states':>10}{'transitions':>13}{'seconds':>9}")
    for name in arguments.models or MODELS:
        began = time.monotonic()
        with MODELS[name].models() as make:
            found = explore(make, depth=UNLIMITED, limit_seconds=arguments.seconds)
        depth = "all" if found.is_complete else str(found.depth)
        counts = f"{found.state_count:>10}{found.transition_count:>13}"
        print(f"{name:28}{depth:>6}{counts}{time.monotonic() - began:>9.1f}", flush=True)
        if found.counterexample is not None:
            print(found.counterexample)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
