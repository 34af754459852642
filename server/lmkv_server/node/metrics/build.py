"""Serves the node's metrics, as configured."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from lmkv.auth.authenticator import Authenticator
from lmkv.config import NodeConfig
from lmkv.config.kinds import OFF
from lmkv_server.node.metrics.server import MetricsServer

logger = logging.getLogger(__name__)


async def serve_metrics(config: NodeConfig, registry: CollectorRegistry, stack: AsyncExitStack) -> int | None:
    """Serves `/metrics` until the stack is closed. Returns its port; None if `metrics_port` is off or not set."""
    if config.metrics_port is None or config.metrics_port == OFF:
        return None
    server = MetricsServer(
        registry,
        config.p2p_host,
        config.metrics_port,
        config.metrics_tls,
        Authenticator(config.auth_tokens, config.credentials.token),
        config.allowed_hosts,
        config.runtime_path,
    )
    await stack.enter_async_context(server)
    scheme = "https" if config.tls_cert else "http"
    logger.info("metrics at %s://%s:%d/metrics", scheme, config.p2p_host, server.port)
    return server.port
