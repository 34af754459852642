"""Health checks of engines, over sockets."""

from __future__ import annotations

import asyncio
import ssl

from lmkv.runtime.reload import Reloadable
from lmkv_server.proxy.engine import BOTH, MAX_HEALTH_TIMEOUTS, Engine
from lmkv_server.proxy.routing.health import HealthMonitor
from lmkv_server.proxy.upstream.client import Upstream, UpstreamClient, open_session
from tests.server.proxy.conftest import MakeEngine
from tests.waiting import WAIT_SECONDS


async def test_only_consecutive_health_checks_without_a_response_make_an_engine_unhealthy(
    make_engine: MakeEngine,
) -> None:
    engine = Engine((await make_engine()).url, BOTH)
    engine.mark_healthy()
    async with open_session() as session:
        client = UpstreamClient(engine, Upstream(session, Reloadable((), ssl.create_default_context)))
        patient = HealthMonitor(interval_seconds=0.0, timeout_seconds=WAIT_SECONDS)
        hasty = HealthMonitor(interval_seconds=0.0, timeout_seconds=0.0)  # no engine responds in time
        for _ in range(2):
            assert [await hasty._check(client) for _ in range(MAX_HEALTH_TIMEOUTS - 1)] == [False, False]
            assert await patient._check(client)
        assert engine.is_healthy
        request = asyncio.ensure_future(client.request("GET", "/health", {}))
        assert [await hasty._check(client) for _ in range(MAX_HEALTH_TIMEOUTS)] == [False, False, False]
        assert not engine.is_healthy
        assert engine.failure == f"{MAX_HEALTH_TIMEOUTS} consecutive health checks timed out"
        await asyncio.gather(request, return_exceptions=True)
