"""What tests of servers share."""

from __future__ import annotations

import pytest

from lmkv_server.coordinator.operations import clears, drains


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances of these tests join before they are asked for, but the coordinator has started just now."""
    for module in (clears, drains):
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)
