"""What `make cluster` checks of upgrades: pods of two versions run at the same time and share what they store."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.cluster.fleet import Fleet
from tests.cluster.nodes import Missed
from tests.cluster.restarts import assert_in_time, of_manifests, owners, settled
from tests.cluster.stored import remembered, share

REASON = re.compile(r"version|format|cannot share|refus", re.IGNORECASE)
"""What a line of a log contains that explains why another version's chunks miss."""


async def upgrade(fleet: Fleet) -> str:
    """Replaces all pods by those of the manifests, one by one in the order of upgrades.

    After each, what was stored before hits at every host, and what one host stores now hits at the other, both ways; or
    a log explains in one line why it misses.
    """
    verify = await remembered(fleet, "upgrade")
    numbers = itertools.count()
    replaced, outcomes = 0, Counter[str]()
    for owner in owners(fleet):
        async for _, stop in fleet.cluster.roll(owner, of_manifests(fleet)):
            replaced += 1
            assert_in_time(stop, owner)
            await settled(fleet)
            outcomes[await outcome(fleet, verify)] += 1
            for source, destination in itertools.permutations(fleet.cluster.hosts, 2):

                async def share_next(source: str = source, destination: str = destination) -> None:
                    await share(fleet, source, destination, next(numbers))

                outcomes[await outcome(fleet, share_next)] += 1
    return f"{replaced} pods replaced: {', '.join(f'{count} {text}' for text, count in outcomes.items())}"


async def outcome(fleet: Fleet, attempt: Callable[[], Awaitable[None]]) -> str:
    """`hits`, or the line by which a log explains the miss. Raises `Missed` if none does.

    Raises `AssertionError` if a pod repeats that line.
    """
    try:
        await attempt()
    except Missed:
        if reasons := await refusals(fleet):
            return f"misses ({reasons[0]})"
        raise
    return "hits"


async def refusals(fleet: Fleet) -> list[str]:
    """The lines of all logs that explain a refusal, without their time stamps."""
    found = []
    for running in fleet.cluster.running.values():
        for container, text in (await running.logs()).items():
            lines = [refusal for line in text.splitlines() if (refusal := refused(line))]
            for line, count in Counter(lines).items():
                assert count == 1, f"{running.pod.name}/{container} repeats {count} times: {line}"
            found += lines
    return found


def refused(line: str) -> str:
    """The message of a line of a log if it is a warning that explains a refusal, else nothing."""
    if not re.search(r'"level": "(warning|error)"|\b(WARNING|ERROR)\b', line):
        return ""
    message = re.search(r'"message": "((?:[^"\\]|\\.)*)"', line)
    text = message[1] if message else line.partition("] ")[2] or line
    return text if REASON.search(text) else ""
