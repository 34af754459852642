"""Which faults come when, drawn from a seed. Pure: `Havoc` carries them out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What can happen, and to what."""

    KILL = "kill"
    """A process is killed, and started again later."""
    FREEZE = "freeze"
    """A process stands still."""
    CLOCK = "clock"
    """A process's clock jumps, and later back."""
    FILL = "fill"
    """A node's disk is full."""
    CROWD = "crowd"
    """A node's memory is full: engines reserve all of its pool that is not in use, and store nothing."""
    CUT = "cut"
    """A link drops everything silently."""
    HALF_CUT = "half-cut"
    """A link passes questions on, and no answers."""
    HALF_OPEN = "half-open"
    """The far end of a link's connections is gone, and the near end does not learn of it."""
    RESET = "reset"
    """A link resets its connections, and refuses new ones."""
    DELAY = "delay"
    """Whatever a link passes on is late."""
    PARTITION = "partition"
    """All links of a node are cut."""
    REPEAT = "repeat"
    """Reports and orders of a node come twice."""
    REORDER = "reorder"
    """Reports of a node change places."""


WEIGHTS = {
    Kind.KILL: 1,
    Kind.FREEZE: 2,
    Kind.CLOCK: 2,
    Kind.FILL: 2,
    Kind.CROWD: 2,
    Kind.CUT: 2,
    Kind.HALF_CUT: 2,
    Kind.HALF_OPEN: 2,
    Kind.RESET: 2,
    Kind.DELAY: 3,
    Kind.PARTITION: 1,
    Kind.REPEAT: 2,
    Kind.REORDER: 2,
}
"""How often each comes, beside the others."""
PAUSE_SECONDS = (0.1, 1.0)
"""Between the beginnings of two faults: several last at a time."""
LAST_SECONDS = (0.05, 3.0)
CLOCK_JUMPS = (-3600.0, -20.0, 20.0, 3600.0)
DELAYS = (0.01, 0.05, 0.3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    at: float
    """When it begins, in seconds from the start."""
    kind: Kind
    target: str
    """A process, or `CALLER>OTHER` for the link by which a process calls another one."""
    seconds: float
    """How long it lasts."""
    amount: float = 0.0
    """Seconds that a clock jumps by, or that a link is late."""

    def __str__(self) -> str:
        amount = f" by {self.amount:g} s" if self.amount else ""
        return f"{self.at:8.2f} s  {self.kind} {self.target}{amount} for {self.seconds:.2f} s"


def schedule(
    seed: int,
    nodes: Sequence[str],
    coordinators: Sequence[str],
    disks: Sequence[str],
    stores: Sequence[str] = (),
) -> Iterator[Fault]:
    """Faults without end, in the order of their beginning; the same ones for the same arguments.

    `disks` are the nodes that have a disk, `stores` what coordinators call.
    """
    chance = random.Random(f"{seed}/schedule")
    processes = [*nodes, *coordinators, *stores]
    reports = [f"{node}>{coordinator}" for node in nodes for coordinator in coordinators]
    words = [f"{node}>{peer}" for node in nodes for peer in nodes if node != peer]
    shared = [f"{coordinator}>{store}" for coordinator in coordinators for store in stores]
    links = [*reports, *words, *shared]
    targets = dict.fromkeys(Kind, links) | {
        Kind.KILL: processes,
        Kind.FREEZE: processes,
        Kind.CLOCK: processes,
        Kind.FILL: list(disks),
        Kind.CROWD: list(nodes),
        Kind.PARTITION: list(nodes),
        Kind.REPEAT: reports,
        Kind.REORDER: reports,
    }
    amounts = {Kind.CLOCK: CLOCK_JUMPS, Kind.DELAY: DELAYS}
    at = 0.0
    while True:
        at += chance.uniform(*PAUSE_SECONDS)
        (kind,) = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield Fault(
            at=at,
            kind=kind,
            target=chance.choice(targets[kind]),
            seconds=chance.uniform(*LAST_SECONDS),
            amount=chance.choice(amounts.get(kind, (0.0,))),
        )
