"""Serves the node's metrics, as configured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry, Metric

from lmkv.auth.authenticator import Authenticator
from lmkv.config import NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv_server.node.ports import describe_port

logger = logging.getLogger(__name__)

INSTANCE_LABEL = "instance_id"
"""As in the coordinator's metrics: Prometheus's own `instance` is an address."""

MAX_CONCURRENT_REQUESTS = 32
MAX_CONNECTIONS_PER_CLIENT = 16
"""Concurrent requests and connections, in total and from one address; see `ConnectionLimiter`."""


class LabelledRegistry(CollectorRegistry):
    """The metrics of another registry, each sample with the label `instance_id`."""

    def __init__(self, registry: CollectorRegistry, instance_id: str) -> None:
        super().__init__()
        self._registry = registry
        self._labels = {INSTANCE_LABEL: instance_id}

    def collect(self) -> Iterator[Metric]:
        """All metrics of the other registry with their present values."""
        for metric in self._registry.collect():
            metric.samples = [sample._replace(labels=self._labels | sample.labels) for sample in metric.samples]
            yield metric


async def serve_metrics(config: NodeConfig, registry: CollectorRegistry, stack: AsyncExitStack) -> int | None:
    """Serves `/metrics` until the stack is closed. Returns its port; None if `metrics_port` is off or not set.

    Raises `ConfigError` if the port cannot be bound.
    """
    if config.metrics_port is None or config.metrics_port == OFF:
        return None
    # Imported here: a node without a metrics port saves the memory of the web server.
    from lmkv_server.http.guard import HostGuard
    from lmkv_server.http.server import HttpOptions, HttpServer, make_metrics_app

    authenticator = Authenticator(config.auth_tokens, config.credentials.token)
    guard = HostGuard(bound=config.p2p_host, allowed=config.allowed_hosts)
    options = HttpOptions(
        host=config.p2p_host,
        port=config.metrics_port,
        key="metrics_port",
        host_key="p2p_host",
        credentials=config.metrics_tls,
        name="lmkv-node-http",
        max_concurrent_requests=MAX_CONCURRENT_REQUESTS,
        max_connections_per_client=MAX_CONNECTIONS_PER_CLIENT,
        probes=frozenset(),
    )
    try:
        app = make_metrics_app(LabelledRegistry(registry, config.instance_id), authenticator, guard)
        server = HttpServer(app, options)
    except ConfigError as error:
        if owner := describe_port(config.runtime_path, config.metrics_port):
            reason = f"metrics_port: cannot listen on {config.p2p_host}:{config.metrics_port}; {owner}"
            raise ConfigError(reason, key="metrics_port") from None
        raise error from None
    stack.push_async_callback(server.aclose)
    await server.start()
    scheme = "https" if config.tls_cert else "http"
    logger.info("metrics at %s://%s:%d/metrics", scheme, config.p2p_host, server.port)
    return server.port
