"""Probes of containers as data, with Kubernetes' defaults, and their calls."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.cluster.translation import Manifest, Unsupported


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What the kubelet does to see whether a container is well."""

    kind: str
    """grpc, httpGet, tcpSocket or exec."""
    port: int = 0
    path: str = ""
    scheme: str = "http"
    command: tuple[str, ...] = ()
    delay_seconds: float
    period_seconds: float
    timeout_seconds: float
    failure_threshold: int


def probe(container: Manifest, name: str) -> Probe | None:
    """A probe of a container, with Kubernetes' defaults; None: it has none of this name. Raises `Unsupported`."""
    if not (spec := container.get(name)):
        return None
    timing: dict[str, Any] = {
        "delay_seconds": spec.get("initialDelaySeconds", 0),
        "period_seconds": spec.get("periodSeconds", 10),
        "timeout_seconds": spec.get("timeoutSeconds", 1),
        "failure_threshold": spec.get("failureThreshold", 3),
    }
    if "grpc" in spec:
        return Probe(kind="grpc", port=spec["grpc"]["port"], **timing)
    if "tcpSocket" in spec:
        return Probe(kind="tcpSocket", port=port_number(container, spec["tcpSocket"]["port"]), **timing)
    if "exec" in spec:
        return Probe(kind="exec", command=tuple(spec["exec"]["command"]), **timing)
    if "httpGet" in spec:
        get = spec["httpGet"]
        scheme = get.get("scheme", "HTTP").lower()
        return Probe(
            kind="httpGet", port=port_number(container, get["port"]), path=get.get("path", "/"), scheme=scheme, **timing
        )
    raise Unsupported(f"probe {spec}")


async def succeeds(spec: Probe, address: str) -> bool:
    """Whether a probe of a pod's address succeeds; not for `exec`."""
    try:
        async with asyncio.timeout(spec.timeout_seconds):
            return await _asked(spec, address)
    except (TimeoutError, OSError, grpc.RpcError, aiohttp.ClientError):
        return False


async def _asked(spec: Probe, address: str) -> bool:
    if spec.kind == "grpc":
        async with grpc.aio.insecure_channel(f"{address}:{spec.port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest())
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    if spec.kind == "tcpSocket":
        _, writer = await asyncio.open_connection(address, spec.port)
        writer.close()
        return True
    context = ssl.create_default_context()  # like the kubelet, without verification
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    url = f"{spec.scheme}://{address}:{spec.port}{spec.path}"
    async with aiohttp.ClientSession() as session, session.get(url, ssl=context) as reply:
        return 200 <= reply.status < 400


def port_number(container: Manifest, port: str | int) -> int:
    """The number of a container's port. Raises `LookupError`."""
    if isinstance(port, int):
        return port
    for each in container.get("ports", ()):
        if each["name"] == port:
            return int(each["containerPort"])
    raise LookupError(f"container {container['name']} has no port {port}")
