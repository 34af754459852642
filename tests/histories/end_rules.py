"""Promises about ends: every call ends in time, and nothing is left when all of them have."""

from __future__ import annotations

from collections.abc import Iterator

from tests.histories.history import History, Violation

LATE_SECONDS = 15.0
"""How much later than its deadline a call may end on a busy machine."""


def calls_end_in_time(history: History) -> Iterator[Violation]:
    """Every call ends before its deadline plus a bound, with an answer unless its process was stopped.

    `seconds` of an answer is the time after which the caller had it or gave up. Only calls without a link have a
    `timeout`, so that faults of links are no excuse.
    """
    for record in history.records:
        if record.call == "Fault" or "timeout" not in record.request:
            continue
        timeout, seconds = record.request["timeout"], record.answer.get("seconds")
        end = record.start + (timeout + LATE_SECONDS if seconds is None else seconds)
        if history.faults(record.server, record.start - LATE_SECONDS, end):
            continue
        if seconds is None or seconds > timeout + LATE_SECONDS:
            yield Violation(rule="calls_end_in_time", what=f"no end after {timeout:g} s", records=(record,))
        elif record.answer.get("error") == "DEADLINE_EXCEEDED":
            yield Violation(rule="calls_end_in_time", what=f"no answer in {timeout:g} s", records=(record,))


def nothing_is_held(history: History) -> Iterator[Violation]:
    """Once all calls have ended, no process keeps a grant, an order, a hold, a pin or reserved memory."""
    for rest in history.of("Rest"):
        if rest.answer["left"]:
            yield Violation(rule="nothing_is_held", what=f"{rest.server} keeps {rest.answer['left']}", records=(rest,))
