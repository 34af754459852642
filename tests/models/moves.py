"""Two coordinators that move one chunk between two nodes, to and fro, and repeat each move after any of its steps.

The nodes have real `Arrivals`, and obey as `OrderExecutor` does. Each coordinator begins a move by reading what the
source has reported last, which may be out of date. Whatever the order of the steps, a node holds the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from lmkv.keys import ChunkKey
from lmkv_server.node.commands.executor import Arrivals
from tests.models.explorer import Action

KEY = ChunkKey(b"k" * 16)


class Node:
    """Holds the chunk, or not."""

    def __init__(self, *, holds: bool) -> None:
        self.holds = holds
        self.arrivals = Arrivals(1)
        self.reported_serial = 1

    def fetch(self, source: Node) -> bool:
        """Has the chunk afterwards, unless neither had it; returns whether it has."""
        if not (self.holds or source.holds):
            return False
        self.holds = True
        self.arrivals.add([KEY])
        return True

    def drop(self, serial: int) -> None:
        """Drops the chunk, unless it has arrived since."""
        if not self.arrivals.since(serial, [KEY]):
            self.holds = False


class Mover:
    """A coordinator that moves the chunk one way, again and again: each of its moves may be the repeat of another."""

    def __init__(self, source: str, destination: str) -> None:
        self.source = source
        self.destination = destination
        self.serial: int | None = None
        """What the source had reported when the move began; None while none runs."""
        self.has_fetched = False


class MoveModel:
    """Nodes `a` and `b`, of which `a` holds the chunk; two coordinators move it to `b`, and one of them back."""

    def __init__(self) -> None:
        self._nodes = {"a": Node(holds=True), "b": Node(holds=False)}
        self._movers = {"1": Mover("a", "b"), "2": Mover("b", "a"), "3": Mover("a", "b")}

    def actions(self) -> Sequence[Action]:
        """See `Model`."""
        found: list[Action] = [
            ("report", name) for name, node in self._nodes.items() if node.reported_serial != node.arrivals.serial
        ]
        for name, mover in self._movers.items():
            if mover.serial is None:
                found.append(("begin", name))
                continue
            found.append(("drop", name) if mover.has_fetched else ("fetch", name))
            found.append(("lose", name))
        return found

    def apply(self, action: Action) -> None:
        """See `Model`."""
        kind, name = str(action[0]), str(action[1])
        if kind == "report":
            self._nodes[name].reported_serial = self._nodes[name].arrivals.serial
            return
        mover = self._movers[name]
        source, destination = self._nodes[mover.source], self._nodes[mover.destination]
        match kind:
            case "begin":
                mover.serial = source.reported_serial
            case "fetch":
                mover.has_fetched = destination.fetch(source)
                if not mover.has_fetched:
                    mover.serial = None
            case "drop":
                assert mover.serial is not None
                source.drop(mover.serial)
                mover.serial, mover.has_fetched = None, False
            case "lose":  # the coordinator is gone; a repeat begins again
                mover.serial, mover.has_fetched = None, False

    def fingerprint(self) -> object:
        """See `Model`: serials count by their order alone."""
        serials = {node.reported_serial for node in self._nodes.values()}
        serials |= {node.arrivals.serial for node in self._nodes.values()}
        serials |= {mover.serial for mover in self._movers.values() if mover.serial is not None}
        ranks = {serial: rank for rank, serial in enumerate(sorted(serials))}
        return (
            [(one.holds, ranks[one.reported_serial], ranks[one.arrivals.serial]) for one in self._nodes.values()],
            [(None if one.serial is None else ranks[one.serial], one.has_fetched) for one in self._movers.values()],
        )

    def check(self) -> None:
        """See `Model`."""
        assert any(node.holds for node in self._nodes.values()), "the chunk is lost"
        for node in self._nodes.values():
            node.arrivals.check()

    def settle(self) -> None:
        """See `Model`: whatever runs ends at once, in this order."""
        for name, mover in self._movers.items():
            if mover.serial is not None and not mover.has_fetched:
                self.apply(("fetch", name))
        for name, mover in self._movers.items():
            if mover.has_fetched:
                self.apply(("drop", name))
        self.check()
