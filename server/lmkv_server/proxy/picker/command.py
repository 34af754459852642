"""`lmkv picker`: runs an endpoint picker until it receives a stop signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging

from lmkv import telemetry
from lmkv.auth.authenticator import Authenticator, exposure
from lmkv.config import PickerConfig, from_arguments
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import fast_loop, first_of, hold_stop_signals, raise_file_limit, stop_on_signals

logger = logging.getLogger(__name__)

SERVICE_NAME = "lmkv-picker"
"""Default service name of exported telemetry; `OTEL_SERVICE_NAME` overrides it."""


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP."""
    config = from_arguments(args, PickerConfig)
    _set_up_logging(config)
    for notice in config.notices:
        logger.warning(notice)
    raise_file_limit()
    hold_stop_signals()
    with telemetry.trace_process(SERVICE_NAME, ""), asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve(config, args))
    return 0


def _set_up_logging(config: PickerConfig) -> None:
    telemetry.set_up_logging(config.log_level, config.log_format, service=SERVICE_NAME)


async def serve(config: PickerConfig, args: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP. Raises `ConfigError` if a port cannot be bound."""
    # Imported here: threads that libraries start, such as NumPy, inherit the signal mask of hold_stop_signals.
    from lmkv_server.proxy.picker.picker import Picker

    stop = stop_on_signals()
    if warning := exposure(config.host, Authenticator(config.auth_tokens), config.client_tls):
        logger.warning(warning)
    picker = Picker(config)
    async with picker, telemetry.export_metrics(picker.metrics, SERVICE_NAME, ""):
        gc.freeze()  # a collection of what start-up made takes tens of milliseconds
        logger.info("Ready on %s", picker.address)
        await first_of(stop.wait(), picker.wait(), follow_logging(args, PickerConfig, _set_up_logging))
    logger.info("Stopped")
