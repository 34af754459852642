"""Probes of containers as data, with Kubernetes' defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def port_number(container: Manifest, port: str | int) -> int:
    """The number of a container's port. Raises `LookupError`."""
    if isinstance(port, int):
        return port
    for each in container.get("ports", ()):
        if each["name"] == port:
            return int(each["containerPort"])
    raise LookupError(f"container {container['name']} has no port {port}")
