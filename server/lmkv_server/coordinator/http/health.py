"""`/healthz` and `/readyz` for probes, and `/grpc_port` for gRPC clients that know the HTTP port only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.http.bodies import json_response
from lmkv_server.coordinator.registry.registry import Registry


def routes(cores: Callable[[], Iterable[Registry]], grpc_port: Callable[[], int], *, names: bool) -> list[Route]:
    """The routes. They need no token; `names` is whether responses may contain instance ids."""

    async def alive(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        for core in cores():
            if not core.is_partial(time.monotonic()):
                continue
            if not names:
                return json_response({"status": "not ready", "detail": "the layout map is being rebuilt"}, 503)
            unsynced = [instance.info.instance_id for instance in core.instances if not instance.synced]
            on = f"for {', '.join(unsynced[:10])}" if unsynced else "for more instances"
            return json_response(
                {"status": "not ready", "detail": f"the layout map is being rebuilt: waiting {on}"}, 503
            )
        return json_response({"status": "ok"})

    async def grpc(_: Request) -> Response:
        return json_response({"grpc_port": grpc_port()})

    return [Route("/healthz", alive), Route("/readyz", ready), Route("/grpc_port", grpc)]
