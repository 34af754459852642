"""The coordinator of these tests: leases expire while they run, and keys need no secret."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.node.fleet_parts import LEASE_SECONDS


@pytest.fixture
def lease_ttl() -> float:
    return LEASE_SECONDS


@pytest.fixture
def coordinator_options() -> dict[str, Any]:
    return {"cluster_secret": ""}
