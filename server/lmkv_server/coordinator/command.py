"""`lmkv coordinator`: runs a coordinator until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from lmkv.cli import Command
from lmkv.config import CoordinatorConfig, add_arguments, from_arguments
from lmkv_server.coordinator.coordinator import Coordinator

logger = logging.getLogger(__name__)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, CoordinatorConfig)


def _run(args: argparse.Namespace) -> int:
    config = from_arguments(args, CoordinatorConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    for notice in config.notices:
        logger.warning(notice)
    asyncio.run(serve(config))
    return 0


async def serve(config: CoordinatorConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises `ConfigError` if a port cannot be had."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    coordinator = Coordinator(
        host=config.host,
        port=config.port,
        monitor_ports=config.monitor_ports,
        lease_ttl=config.lease_ttl,
        cluster_secret=config.cluster_secret,
    )
    async with coordinator:
        logger.info("lmkv coordinator ready on %s", coordinator.address)
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(coordinator.wait())
        try:
            done, _ = await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            failed.cancel()
        if failed in done:
            failed.result()
    logger.info("lmkv coordinator stopped")


command = Command(
    name="coordinator",
    help="serve the layout map: who is in the fleet and holds what",
    add_arguments=_add_arguments,
    run=_run,
    examples=(
        "  lmkv coordinator                          serve on 127.0.0.1:9000\n"
        "  lmkv coordinator --host 0.0.0.0 --port 9100"
    ),
)
