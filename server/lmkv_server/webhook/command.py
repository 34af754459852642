"""`lmkv webhook`: adds lmkv to the pods of engines that others create, until it receives a stop signal."""

from __future__ import annotations

import argparse
import asyncio
import logging

from lmkv import telemetry
from lmkv.config import WebhookConfig, from_arguments
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import fast_loop, first_of, hold_stop_signals, stop_on_signals

logger = logging.getLogger(__name__)

SERVICE_NAME = "lmkv-webhook"


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP."""
    config = from_arguments(args, WebhookConfig)
    config.check_complete()
    _set_up_logging(config)
    for notice in config.notices:
        logger.warning(notice)
    hold_stop_signals()
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve(config, args))
    return 0


def _set_up_logging(config: WebhookConfig) -> None:
    telemetry.set_up_logging(config.log_level, config.log_format, service=SERVICE_NAME)


async def serve(config: WebhookConfig, args: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP. Raises `ConfigError` if a file is invalid or the port cannot be bound."""
    # Imported here: threads that libraries start inherit the signal mask of hold_stop_signals.
    from lmkv_server.http.server import HttpOptions, HttpServer, address
    from lmkv_server.webhook.app import make_app
    from lmkv_server.webhook.injection import read_additions

    stop = stop_on_signals()
    additions = read_additions(config.pod_additions)
    options = HttpOptions(host=config.host, port=config.port, credentials=config.credentials, name="lmkv-webhook")
    server = HttpServer(make_app(additions), options)
    await server.start()
    try:
        logger.info("Ready on https://%s", address(config.host, server.port))
        await first_of(stop.wait(), follow_logging(args, WebhookConfig, _set_up_logging))
    finally:
        await server.aclose()
    logger.info("Stopped")
