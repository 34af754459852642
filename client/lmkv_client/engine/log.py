"""The log of the engine API: the standard library's, under the name `lmkv.engine`."""

from __future__ import annotations

import logging

logger = logging.getLogger("lmkv.engine")


def join_log(parent: logging.Logger) -> None:
    """Makes the messages of this package appear where those of `parent` do, at its level: in the log of an engine that
    configures loggers by name."""
    logger.parent = parent
    logger.setLevel(logging.NOTSET)  # forgets which levels were enabled
