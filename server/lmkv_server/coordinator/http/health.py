"""`/healthz` and `/readyz`, for probes; and `/grpc_port`, for clients of gRPC that were given the HTTP port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv_server.coordinator.http.replies import json_response
from lmkv_server.coordinator.registry.registry import Registry


def routes(cores: Callable[[], Iterable[Registry]], grpc_port: Callable[[], int], *, names: bool) -> list[Route]:
    """The paths; that they answer says that the event loop runs and the ports are open.

    They need no token: `names` is whether instances are named to every client.
    """

    async def alive(_: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: Request) -> Response:
        for core in cores():
            if not core.is_partial(time.monotonic()):
                continue
            if not names:
                return json_response({"status": "not ready", "detail": "the layout map is being rebuilt"}, 503)
            waiting = [instance.info.instance_id for instance in core.instances if not instance.synced]
            on = f"on {', '.join(waiting[:10])}" if waiting else "whether more instances come"
            return json_response(
                {"status": "not ready", "detail": f"the layout map is being rebuilt: waiting {on}"}, 503
            )
        return json_response({"status": "ok"})

    async def grpc(_: Request) -> Response:
        return json_response({"grpc_port": grpc_port()})

    return [Route("/healthz", alive), Route("/readyz", ready), Route("/grpc_port", grpc)]
