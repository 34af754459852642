"""A node and a coordinator of different versions: neither uses the other, and both say why in one sentence."""

from __future__ import annotations

import pytest

from lmkv import __version__
from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv.internal import PROTOCOL_VERSION
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.fleet import registration, session
from tests.server.node.fleet_parts import KEYS, Asker, Shelf
from tests.server.node.ordering import Ordering, serving
from tests.waiting import until

FIX = "the node shares nothing until both run the same version: upgrade coordinators and nodes together"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REFUSED_DELAY_SECONDS", 0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What both have logged about the fix."""
    return [record.getMessage() for record in caplog.records if FIX in record.getMessage()]


@pytest.mark.parametrize(
    ("version", "protocol_version", "said"),
    [
        ("", 0, "lmkv of an unknown version (protocol 0)"),  # from before there was a number
        ("9.0.0", PROTOCOL_VERSION + 1, f"lmkv 9.0.0 (protocol {PROTOCOL_VERSION + 1})"),
    ],
)
async def test_a_node_leaves_a_coordinator_of_another_version_and_joins_it_once_it_is_upgraded(
    caplog: pytest.LogCaptureFixture, version: str, protocol_version: int, said: str
) -> None:
    ordering, shelf = Ordering(), Shelf()
    ordering.version, ordering.protocol_version = version, protocol_version
    async with serving(ordering) as address, shelf.join(address) as fleet:
        await fleet.started()
        await until(lambda: ordering.farewell_count > 5)
        assert not fleet.connected
        (of_coordinator,) = fleet.sessions
        assert of_coordinator._mismatch_seconds > 0.01 * 2**4, "an older one logs each attempt"
        assert ordering.stream_count == 0, "it reports nothing to a coordinator that may misunderstand it"
        (line,) = lines(caplog)
        own = f"lmkv {__version__} (protocol {PROTOCOL_VERSION})"
        assert line == (
            f"not in the fleet at {address}, trying again: the node runs {own}, the coordinator runs {said}; {FIX}"
        )
        ordering.protocol_version = PROTOCOL_VERSION
        await until(lambda: ordering.stream_count == 1)
        assert of_coordinator._mismatch_seconds == 0.01


async def test_a_node_of_another_version_is_in_no_layout_map_and_joins_once_it_is_upgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    shelf.put(KEYS[:2])
    with monkeypatch.context() as earlier:
        earlier.setattr(registration, "PROTOCOL_VERSION", PROTOCOL_VERSION - 1)
        async with (
            Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=600.0)) as coordinator,
            shelf.join(coordinator.address) as fleet,
        ):
            await fleet.started()
            asker = Asker(coordinator.address)
            await until(lambda: len(lines(caplog)) >= 2)
            assert not fleet.connected
            assert (await asker.instances(), await asker.tokens()) == ([], {})
            node, *_ = (line for line in lines(caplog) if line.startswith("not in the fleet"))
            refused, *_ = (line for line in lines(caplog) if line.startswith("refused instance a"))
            assert node.partition("again: ")[2] == refused.partition("instance a: ")[2]
            earlier.undo()
            await asker.until({"a": 512})
            assert sum(line.startswith("not in the fleet") for line in lines(caplog)) == 1
