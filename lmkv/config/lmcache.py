"""Translates LMCache's configuration to lmkv's. Pure.

`lmkv config import` writes a configuration file of lmkv. `load` adopts `LMCACHE_CONFIG_FILE` and `LMCACHE_*`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lmkv.config.connector import ConnectorConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.kinds import FLAG, one_port
from lmkv.config.node import NodeConfig
from lmkv.config.router import ProxyConfig
from lmkv.config.schema import Alias, Config, keys
from lmkv.config.sources import REPLACED, SourceEntry, spellings

_PROCESSES: tuple[type[Config], ...] = (ConnectorConfig, CoordinatorConfig, ProxyConfig)
"""Classes whose keys a file may set. Keys of several classes are the same in each."""


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
"""LMCache's names of keys of lmkv that lmkv does not read as aliases, with the conversion of their values."""


def _without_index(raw: object) -> object:
    """`cuda` of LMCache's `cuda:0`: each worker of an engine uses its own GPU."""
    return raw.partition(":")[0] if isinstance(raw, str) and re.fullmatch(r"cuda:\d+", raw) else raw


VALUES: Mapping[str, Callable[[object], object]] = {"pd_buffer_device": _without_index}
"""Conversions of LMCache's values of keys that lmkv has too."""

ABSENT: Mapping[str, str] = {
    "blocking_timeout_secs": "load_timeout limits the wait for a load",
    "enable_blending": "only common prefixes of prompts are shared",
    "external_lookup_client": "nodes look up at the coordinator",
    "health_check_interval": "the coordinator's lease_ttl limits the silence of an instance",
    "internal_api_server_enabled": "metrics_port serves metrics",
    "internal_api_server_host": "metrics are served on p2p_host",
    "internal_api_server_port_start": "metrics_port serves metrics",
    "lmcache_worker_heartbeat_delay_time": "the coordinator's lease_ttl sets how often nodes report",
    "lmcache_worker_ids": "one node serves all ranks, at p2p_port",
    "lmcache_worker_timeout": "the coordinator's lease_ttl limits the silence of an instance",
    "numa_mode": "numa_node sets where the pool is",
    "p2p_max_retry_count": "load_timeout limits fetches with their retries",
    "p2p_socket_recv_timeout_ms": "load_timeout limits fetches",
    "p2p_socket_send_timeout_ms": "load_timeout limits fetches",
    "pd_skip_proxy_notification": "the proxy needs no notification",
    "pin_check_interval_sec": "pins expire on their own",
    "pin_timeout_sec": "each pin has its own TTL",
    "plugin_locations": "plug-ins are entry points",
    "pre_caching_hash_algorithm": "chunk keys are always SHA-256",
    "remote_config_url": "each process reads its own file",
    "remote_storage_plugins": "plug-ins are entry points",
    "run_script_api_enabled": "lmkv runs no scripts",
    "runtime_plugin_locations": "plug-ins are entry points",
    "s3_region": "set AWS_REGION, or the host of remote_url",
    "script_allowed_imports": "lmkv runs no scripts",
}
"""Keys of LMCache without a counterpart, and what replaces them. Further ones are reported as unknown."""


CONTROLLER_KEYS = ("controller_host", "controller_monitor_ports", "controller_port")
"""Keys of LMCache's controller: only the coordinator reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """The values that one process adopts from LMCache's configuration."""

    values: Mapping[str, Any]
    """Values by lmkv's key."""
    written: Mapping[str, str]
    """The spelling of each of these keys."""
    places: Mapping[str, str]
    """The source of each of these keys."""
    notices: list[str]
    """Messages about adopted, overridden and ignored keys."""


def adopt(cls: type[Config], entries: Iterable[SourceEntry], own: Mapping[str, Any]) -> Adopted:
    """LMCache's values for the keys of `cls` that `own` does not set. The last of several entries of a key wins.

    Invalid and unknown entries raise nothing; a notice names each.
    """
    taken: dict[str, Imported] = {}
    overridden: dict[str, Imported] = {}
    ignored: list[str] = []
    for one in map(_translate, _flat(entries)):
        if not one.name:
            ignored.append(f"{one.entry.shown} {one.entry.place} is ignored: {one.reason}")
        elif one.name in keys(cls) and (one.entry.spelling not in CONTROLLER_KEYS or cls is CoordinatorConfig):
            (overridden if one.name in own else taken)[one.name] = one
    notices = ignored if issubclass(cls, NodeConfig) else []  # other processes share these files with engines
    if overridden:
        notices = [f"lmkv's own configuration overrides LMCache's: {_list(overridden.values())}", *notices]
    if taken:
        notices = [f"using LMCache's configuration where lmkv's own sets nothing: {_list(taken.values())}", *notices]
    return Adopted(
        values={name: one.value for name, one in taken.items()},
        written={name: one.entry.shown for name, one in taken.items()},
        places={name: one.entry.place for name, one in taken.items()},
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
    """The translation of one key."""

    entry: SourceEntry
    name: str = ""
    """lmkv's key; empty if there is none."""
    value: Any = None
    """The value for YAML."""
    reason: str = ""
    """Why there is no key, or what part of the value was dropped."""

    @property
    def notice(self) -> str:
        """A message about the translation."""
        if not self.name:
            return f"{as_yaml(self.entry.spelling)}: ignored; {self.reason}"
        became = f"{self.entry.spelling}: {as_yaml(self.entry.raw)}"
        if self.entry.spelling != self.name or self.entry.raw != self.value:
            became += f" is now {self.name}: {as_yaml(self.value)}"
        else:
            became += " stays"
        return f"{became}; {self.reason}" if self.reason else became


def translate(entries: Iterable[SourceEntry]) -> list[Imported]:
    """Translates all keys of a file, including those in `extra_config`.

    Raises `ConfigError` if the resulting configuration of a process is invalid.
    """
    done: list[Imported] = []
    values: dict[str, Any] = {}
    for entry in _flat(entries):
        one = _translate(entry)
        if one.name in values and values[one.name] != one.value:
            known = as_yaml(values[one.name])
            one = Imported(entry=entry, reason=f"{one.name} is already {known}, by another key of this file")
        if one.name:
            if one.name in values:
                one = Imported(entry=entry, reason=f"{one.name} already has this value")
            else:
                values[one.name] = one.value
        done.append(one)
    for cls in _PROCESSES:
        cls(**{name: value for name, value in values.items() if name in keys(cls)})
    return done


def render(imported: Iterable[Imported], source: str) -> str:
    """A configuration file of lmkv. Keys without a counterpart become comments with the reason."""
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
    """A value as YAML on one line."""
    import yaml

    text: str = yaml.safe_dump([value], default_flow_style=True, width=1 << 30, allow_unicode=True)
    if len(text.splitlines()) > 1:  # text with line breaks, which are escaped only between double quotes
        text = yaml.safe_dump([value], default_flow_style=True, width=1 << 30, default_style='"')
    return text.rstrip("\n")[1:-1]


def _flat(entries: Iterable[SourceEntry]) -> Iterator[SourceEntry]:
    """The entries with values, including those inside `extra_config`."""
    for entry in entries:
        if entry.spelling == "extra_config" and isinstance(extra := _mapping(entry.raw), Mapping):
            show = partial("{1} of {0}".format, entry.shown)
            yield from (entry._replace(spelling=str(name), raw=raw, show=show) for name, raw in extra.items())
        elif entry.raw is not None:
            yield entry


def _mapping(raw: object) -> object:
    """Decodes JSON text; other values are returned unchanged."""
    with suppress(ValueError, RecursionError):
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
                known = VALUES[name](raw) if name in VALUES else raw
                value = keys(cls)[name].kind.read(alias.convert(renamed.convert(known)))
            except ValueError as error:
                return Imported(entry=entry, reason=str(error))
            return Imported(entry=entry, name=name, value=_plain(entry, name, value), reason=lost)
    return Imported(entry=entry, reason="lmkv has no such key")


def _plain(entry: SourceEntry, name: str, value: Any) -> Any:
    """A value for YAML; the raw value if the key already has lmkv's name."""
    if entry.spelling == name and name not in VALUES:
        return entry.raw
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
