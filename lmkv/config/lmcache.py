"""From LMCache's configuration to lmkv's: what becomes of each key, and why. Pure.

`lmkv config import` makes a file of lmkv's own. `load` adopts what `LMCACHE_CONFIG_FILE` and `LMCACHE_*` set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmkv.config.connector import ConnectorConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.kinds import FLAG, one_port
from lmkv.config.node import NodeConfig
from lmkv.config.proxy import ProxyConfig
from lmkv.config.schema import Alias, Config, keys
from lmkv.config.sources import SourceEntry
from lmkv.config.spellings import REPLACED, spellings

_PROCESSES: tuple[type[Config], ...] = (ConnectorConfig, CoordinatorConfig, ProxyConfig)
"""Whose keys a file may set. A key of several means the same in each, and so the first is asked."""

RENAMED: Mapping[str, Alias] = {
    "controller_host": Alias(name="host"),
    "controller_monitor_ports": Alias(name="monitor_ports"),
    "controller_port": Alias(name="port"),
    "enable_xpyd": Alias(name="enable_pd"),
    "local_cpu_use_hugepages": Alias(
        name="pool_huge_pages", convert=lambda raw: "always" if FLAG.read(raw) else "never"
    ),
    "nixl_buffer_device": Alias(name="pd_buffer_device"),
    "nixl_buffer_size": Alias(name="pd_buffer_size"),
    "nixl_peer_alloc_port": Alias(name="pd_peer_alloc_port"),
    "nixl_peer_host": Alias(name="pd_peer_host"),
    "nixl_peer_init_port": Alias(name="pd_peer_init_port"),
    "nixl_proxy_host": Alias(name="pd_proxy_host"),
    "nixl_proxy_port": Alias(name="pd_proxy_port"),
    "nixl_role": Alias(name="pd_role"),
}
"""Keys that lmkv has by a name that it does not read, with what turns their values into its own."""

ABSENT: Mapping[str, str] = {
    "blocking_timeout_secs": "load_timeout is the most time that a request waits for a load",
    "enable_blending": "only what prompts begin with alike is shared",
    "external_lookup_client": "the node looks up, and asks the coordinator where others may have it",
    "health_check_interval": "the coordinator's lease_ttl decides how long a silent instance counts as alive",
    "internal_api_server_enabled": "metrics_port serves metrics; `lmkv instances` and `lmkv doctor` tell the rest",
    "internal_api_server_host": "metrics are served on p2p_host",
    "internal_api_server_port_start": "metrics_port serves metrics",
    "lmcache_worker_heartbeat_delay_time": "the coordinator's lease_ttl decides how often nodes report",
    "lmcache_worker_ids": "one node serves all ranks, at p2p_port",
    "lmcache_worker_timeout": "the coordinator's lease_ttl decides how long a silent instance counts as alive",
    "numa_mode": "numa_node says where the pool's memory is, and finds it out by itself",
    "p2p_max_retry_count": "load_timeout is the most time that a fetch takes, however often it is tried",
    "p2p_socket_recv_timeout_ms": "load_timeout is the most time that a fetch takes",
    "p2p_socket_send_timeout_ms": "load_timeout is the most time that a fetch takes",
    "pd_skip_proxy_notification": "nobody tells the proxy",
    "pin_check_interval_sec": "each pin ends by itself",
    "pin_timeout_sec": "each pin says how long it lasts",
    "plugin_locations": "lmkv loads nobody's code",
    "pre_caching_hash_algorithm": "chunk keys are SHA-256, the same on every host, whatever PYTHONHASHSEED is",
    "remote_config_url": "each process reads its own file",
    "remote_storage_plugins": "lmkv loads nobody's code",
    "run_script_api_enabled": "lmkv runs nobody's scripts",
    "runtime_plugin_locations": "lmkv loads nobody's code",
    "s3_region": "AWS_REGION says it, or the host of remote_url",
    "script_allowed_imports": "lmkv runs nobody's scripts",
}
"""Keys of LMCache that lmkv does not read, and what is in their place. The rest of these is only named as unknown."""


CONTROLLER_KEYS = ("controller_host", "controller_monitor_ports", "controller_port")
"""Keys of LMCache's controller: no other process than the coordinator has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """What one process takes from LMCache's configuration."""

    values: Mapping[str, Any]
    """By key of lmkv."""
    written: Mapping[str, str]
    """How each of these was written."""
    notices: list[str]
    """What was taken, what lmkv's own configuration overrides, and what has no counterpart."""


def adopt(cls: type[Config], entries: Iterable[SourceEntry], own: Mapping[str, Any]) -> Adopted:
    """LMCache's values for the keys of `cls` that `own` does not set. Of two entries for a key the last one counts.

    Nothing here stops a process: what lmkv cannot take is named in a notice of its own.
    """
    taken: dict[str, Imported] = {}
    overridden: dict[str, Imported] = {}
    ignored: list[str] = []
    for one in map(_translate, _flat(entries)):
        if not one.name:
            ignored.append(f"{one.entry.shown} {one.entry.place} is ignored: {one.reason}")
        elif one.name in keys(cls) and (one.entry.spelling not in CONTROLLER_KEYS or cls is CoordinatorConfig):
            (overridden if one.name in own else taken)[one.name] = one
    notices = ignored if issubclass(cls, NodeConfig) else []  # all that LMCache's engines read, other processes share
    if overridden:
        notices = [f"lmkv's own configuration wins over LMCache's: {_list(overridden.values())}", *notices]
    if taken:
        notices = [f"using LMCache's configuration where lmkv's own sets nothing: {_list(taken.values())}", *notices]
    return Adopted(
        values={name: one.value for name, one in taken.items()},
        written={name: one.entry.shown for name, one in taken.items()},
        notices=notices,
    )


def _list(imported: Iterable[Imported]) -> str:
    """`LMCACHE_CHUNK_SIZE in the environment, local_cpu and pd_role in lmcache.yaml`."""
    places: dict[str, dict[str, None]] = {}
    for one in imported:
        places.setdefault(one.entry.place, {})[one.entry.shown] = None
    return "; ".join(f"{', '.join(shown)} {place}" for place, shown in places.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What became of one key."""

    entry: SourceEntry
    name: str = ""
    """The key of lmkv that has its value now; empty if there is none."""
    value: Any = None
    """Its value, as YAML has it."""
    reason: str = ""
    """Why there is none, or what the value has lost."""

    @property
    def notice(self) -> str:
        """A line for whoever imports."""
        if not self.name:
            return f"{as_yaml(self.entry.spelling)}: left out; {self.reason}"
        became = f"{self.entry.spelling}: {as_yaml(self.entry.raw)}"
        if self.entry.spelling != self.name or self.entry.raw != self.value:
            became += f" is now {self.name}: {as_yaml(self.value)}"
        else:
            became += " stays"
        return f"{became}; {self.reason}" if self.reason else became


def translate(entries: Iterable[SourceEntry]) -> list[Imported]:
    """What becomes of each key of a file, those within `extra_config` included.

    Raises `ConfigError` if what comes out, taken together, is none of a process's configurations.
    """
    done: list[Imported] = []
    values: dict[str, Any] = {}
    for entry in _flat(entries):
        one = _translate(entry)
        if one.name in values and values[one.name] != one.value:
            said = as_yaml(values[one.name])
            one = Imported(entry=entry, reason=f"{one.name} is {said} already, by another key of this file")
        if one.name:
            if one.name in values:
                one = Imported(entry=entry, reason=f"{one.name} says the same already")
            else:
                values[one.name] = one.value
        done.append(one)
    for cls in _PROCESSES:
        cls(**{name: value for name, value in values.items() if name in keys(cls)})
    return done


def render(imported: Iterable[Imported], source: str) -> str:
    """The file of lmkv. What has no counterpart stays in it as a comment, with the reason."""
    lines = [f"# Made of {json.dumps(source)[1:-1]} by `lmkv config import`."]
    for one in imported:
        if not one.name:
            lines.append(f"# {as_yaml(one.entry.spelling)}: {as_yaml(one.entry.raw)}  # {one.reason}")
        elif one.name == one.entry.spelling:
            lines.append(f"{one.name}: {as_yaml(one.value)}")
        else:
            lines.append(f"{one.name}: {as_yaml(one.value)}  # {one.entry.spelling}")
    return "\n".join(lines) + "\n"


def as_yaml(value: object) -> str:
    """A value on one line."""
    import yaml

    text: str = yaml.safe_dump([value], default_flow_style=True, width=1 << 30, allow_unicode=True)
    if len(text.splitlines()) > 1:  # text with line breaks, which are escaped only between double quotes
        text = yaml.safe_dump([value], default_flow_style=True, width=1 << 30, default_style='"')
    return text.rstrip("\n")[1:-1]


def _flat(entries: Iterable[SourceEntry]) -> Iterator[SourceEntry]:
    """The keys that have values, with those of `extra_config` one by one."""
    for entry in entries:
        if entry.spelling == "extra_config" and isinstance(extra := _mapping(entry.raw), Mapping):
            yield from (entry._replace(spelling=str(name), raw=raw) for name, raw in extra.items())
        elif entry.raw is not None:
            yield entry


def _mapping(raw: object) -> object:
    """JSON of the environment as what it means; anything else as it is."""
    with suppress(ValueError):
        return json.loads(raw) if isinstance(raw, str) else raw
    return raw


def _translate(entry: SourceEntry) -> Imported:
    renamed = RENAMED.get(entry.spelling, Alias(name=entry.spelling))
    if reason := REPLACED.get(renamed.name) or ABSENT.get(renamed.name):
        return Imported(entry=entry, reason=reason)
    for cls in _PROCESSES:
        if found := spellings(cls).get(renamed.name):
            name, alias = found
            raw, lost = entry.raw, ""
            if alias.convert is one_port and isinstance(raw, list) and len(raw) > 1:
                raw, lost = raw[0], "one node serves all ranks, with one port"
            try:
                value = keys(cls)[name].kind.read(alias.convert(renamed.convert(raw)))
            except ValueError as error:
                return Imported(entry=entry, reason=str(error))
            return Imported(entry=entry, name=name, value=_plain(entry, name, value), reason=lost)
    return Imported(entry=entry, reason="lmkv knows no such key")


def _plain(entry: SourceEntry, name: str, value: Any) -> Any:
    """A value as YAML has it; what is said in lmkv's words already stays as it was written."""
    if entry.spelling == name:
        return entry.raw
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
