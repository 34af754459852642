"""The fewest records of a history that still show a violation: delta debugging (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.histories.checker import RULES
from tests.histories.history import History, Record, Violation

LONGEST_SECONDS = 120.0


def minimise(history: History, violation: Violation, seconds: float = LONGEST_SECONDS) -> list[Record]:
    """Records of which none can be left out: without it, the same rule does not report the same any more.

    "The same" is the text and the records of the violation. A rule names in it whatever could have explained the
    answer, so that leaving out an explanation does not create a violation that was none. After `seconds`, returns what
    is left by then.
    """
    (rule,) = (rule for rule in RULES if rule.__name__ == violation.rule)
    deadline = time.monotonic() + seconds

    def shows(records: Sequence[Record]) -> bool:
        return violation in rule(History(records))

    kept = list(history.records)
    for name in ("call", "server", "actor"):  # most kinds of calls and processes do not matter
        for value in sorted({getattr(record, name) for record in kept}):
            fewer = [record for record in kept if getattr(record, name) != value]
            kept = fewer if shows(fewer) else kept
    size = max(len(kept) // 2, 1)
    while size:
        before, start = len(kept), 0
        while start < len(kept) and time.monotonic() < deadline:
            fewer = kept[:start] + kept[start + size :]
            if shows(fewer):
                kept = fewer
            else:
                start += size
        size = size // 2 or int(len(kept) < before)
    return kept
