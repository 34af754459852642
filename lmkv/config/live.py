"""Applies logging keys of a configuration file to a running process: they take effect without a restart."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lmkv.config.arguments import file_from_arguments, from_arguments
from lmkv.config.schema import Config
from lmkv.runtime.reload import Reloadable

C = TypeVar("C", bound=Config)

CHECK_SECONDS = 5.0
"""Interval at which the file is checked for a change. Kubernetes updates a mounted ConfigMap within about a minute."""


async def follow_logging(
    args: argparse.Namespace, cls: type[C], set_up: Callable[[C], None], *, env: Mapping[str, str] = os.environ
) -> None:
    """Calls `set_up` with the configuration each time its file changes. Never returns; cancel it.

    Environment and flags still override the file. An invalid file is logged, and logging stays as it was. Does nothing
    if no regular file is configured: a pipe can be read only once.
    """
    path = file_from_arguments(args, env)
    file = (
        Reloadable([path], lambda: set_up(from_arguments(args, cls, env=env))) if path and _is_regular(path) else None
    )
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if file:
            file.get()


def _is_regular(path: str) -> bool:
    return Path(path).is_file()
