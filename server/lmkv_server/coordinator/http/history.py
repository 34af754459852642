"""`/history`: the samples of the last hour, for the page. An HTTP path only: metrics are for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.core.history import PERIOD_SECONDS, Series
from lmkv_server.coordinator.http.bodies import json_response
from lmkv_server.coordinator.services.services import Services


def routes(services: Services) -> list[Route]:
    """The route of one tenant."""

    async def serve(request: Request) -> Response:
        """The fleet's samples, or those of `instance_id`. Raises `InstanceNotFound`."""
        instance_id = request.query_params.get("instance_id", "")
        if not instance_id:
            return json_response(content_of(services.history.fleet))
        services.core.instances.named(instance_id, "instance_id")
        return json_response(content_of(services.history.series(instance_id)))

    return [Route("/history", serve)]


def content_of(series: Series) -> dict[str, Any]:
    """Samples as columns of equal length, the oldest sample first."""
    return {
        "period_seconds": PERIOD_SECONDS,
        "times": _numbers(series.times),
        **{name: _numbers(column) for name, column in series.counts.items()},
        "used_bytes": {tier: _numbers(column) for tier, column in series.used_bytes.items()},
    }


def _numbers(column: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in column]
