"""What the watcher of processes makes of one that ended by itself. Its processes are scripted."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.watchers import Died, MetricsWatcher

ABORTED = "INFO reading from node-2\n[vm:3752 :0:3778] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout\n"


class EndedNode:
    """A node that is not alive until it is started again."""

    name = "node-1"
    is_wanted = True

    def __init__(self, log: str) -> None:
        self.process = SimpleNamespace(alive=False, log=lambda: log)
        self.calls: list[str] = []

    def kill(self) -> None:
        """Ends what is left of it."""
        self.calls.append("kill")

    def start(self) -> None:
        """Starts it again."""
        self.calls.append("start")
        self.process.alive = True


async def watch(node: EndedNode, counts: Counter[str]) -> None:
    """Watches until the node is alive, or its end is an error."""
    fleet: Any = SimpleNamespace(victims={node.name: node}, nodes=[])
    watching = asyncio.create_task(MetricsWatcher(fleet, 1, counts).run())
    while not node.process.alive and not watching.done():
        await asyncio.wait([watching], timeout=0.05)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=not watching.done())


async def test_a_node_that_ucx_has_aborted_is_counted_and_started_again() -> None:
    node, counts = EndedNode(ABORTED), Counter[str]()
    await watch(node, counts)
    assert node.calls == ["kill", "start"]
    assert counts == {"nodes aborted by UCX": 1}


@pytest.mark.parametrize("log", ["", "Traceback\n", ABORTED + "INFO node ready\n"])
async def test_any_other_end_without_a_fault_is_an_error(log: str) -> None:
    node = EndedNode(log)
    with pytest.raises(Died, match="node-1 ended by itself"):
        await watch(node, Counter())
    assert not node.calls
