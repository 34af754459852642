"""Extensions that installed packages offer by entry points. A module is imported only when it is loaded by name."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from lmkv.errors import ConfigError

CHANNELS = "lmkv.channels"
"""Group of transfer channels: classes with `async open(ChannelEnd) -> Channel`, see `lmkv.transfer.channel`."""
TIERS = "lmkv.tiers"
"""Group of secondary tiers: functions that make one of a `TierContext`, see `lmkv_server.node.tiers.build`."""


def plugin_names(group: str) -> tuple[str, ...]:
    """The names of all installed plug-ins of a group."""
    return tuple(dict.fromkeys(point.name for point in metadata.entry_points(group=group)))


def load_plugin(group: str, name: str) -> Any:
    """The object of the entry point `name`. Raises `ConfigError` if there is none or it cannot be loaded."""
    for point in metadata.entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # the code of another package may raise anything
            raise ConfigError(f"the plug-in {name!r} ({point.value}) cannot be loaded: {error!r}") from error
    raise ConfigError(f"no installed package offers {name!r} by an entry point of the group {group}")
