"""`lmkv proxy`: runs a proxy until it receives a stop signal."""

from __future__ import annotations

import argparse
import asyncio
import logging

from lmkv import telemetry
from lmkv.config import ProxyConfig, from_arguments
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import fast_loop, first_of, hold_stop_signals, raise_file_limit, stop_on_signals

logger = logging.getLogger(__name__)

SERVICE_NAME = "lmkv-proxy"
"""Default service name of exported telemetry; `OTEL_SERVICE_NAME` overrides it."""


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP."""
    config = from_arguments(args, ProxyConfig)
    _set_up_logging(config)
    for notice in config.notices:
        logger.warning(notice)
    raise_file_limit()
    hold_stop_signals()
    with telemetry.trace_process(SERVICE_NAME, ""), asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve(config, args))
    return 0


def _set_up_logging(config: ProxyConfig) -> None:
    telemetry.set_up_logging(config.log_level, config.log_format, service=SERVICE_NAME)


async def serve(config: ProxyConfig, args: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP. Raises `ConfigError` if the port cannot be bound."""
    # Imported here: threads that libraries start, such as NumPy, inherit the signal mask of hold_stop_signals.
    from lmkv_server.proxy.proxy import Proxy

    stop = stop_on_signals()
    proxy = Proxy(config)
    async with proxy, telemetry.export_metrics(proxy.metrics, SERVICE_NAME, ""):
        logger.info("Ready on %s", proxy.url)
        await first_of(stop.wait(), proxy.wait(), follow_logging(args, ProxyConfig, _set_up_logging))
    logger.info("Stopped")
