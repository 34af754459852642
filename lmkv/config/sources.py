"""Reads the sources of configuration, which are a YAML file, the environment and flags, in all spellings of keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkv.errors import ConfigError

if TYPE_CHECKING:
    import yaml
from functools import cache

from lmkv.config.connector import ClientConfig, ConnectorConfig, WebhookConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.node import NodeConfig
from lmkv.config.router import ProxyConfig
from lmkv.config.schema import Alias, Config, keys

PREFIX = "LMKV_"
FILE_VARIABLE = "LMKV_CONFIG_FILE"
LMCACHE_PREFIX = "LMCACHE_"
LMCACHE_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
MAX_VALUES = 10_000
"""Values in a file. With aliases a few lines can stand for more than the memory holds."""

# Kubernetes sets variables for every service in every container: LMKV_PORT=tcp://10.0.0.1:9000 is no configuration.
_SERVICE_LINK = re.compile(r"(LMKV|LMCACHE)_(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_[0-9]+_(TCP|UDP|SCTP)(_.+)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")


class SourceEntry(NamedTuple):
    """One key and its value in a source."""

    spelling: str
    """The name of the key in the source, perhaps an alias."""
    raw: object
    """The value; None: the key is not set."""
    place: str
    """The source, for messages."""
    show: Callable[[str], str] = str
    """Formats a key as in the source: `p2p_port`, `LMKV_P2P_PORT`, `--p2p-port`."""

    @property
    def shown(self) -> str:
        """The key as written in the source."""
        return self.show(self.spelling)


def variable(name: str) -> str:
    """The environment variable of a key."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """The flag of a key."""
    return "--" + name.replace("_", "-")


def read_file(path: Path, named_by: str) -> list[SourceEntry]:
    """Entries of a YAML file, which `named_by` refers to. Raises `ConfigError` if it cannot be read."""
    import yaml  # slow to import, and many processes have no file

    try:
        content = yaml.load(path.read_bytes(), Loader=_strict_loader())  # noqa: S506 # derived from SafeLoader
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {path}: {error.strerror}; it is set by {named_by}", path=path
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is too deeply nested", path=path) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}", path=path) from None
    if not _is_bounded(content):
        raise ConfigError(f"{path} has more than {MAX_VALUES} values, aliases included", path=path)
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys with values, such as `chunk_size: 256`", path=path)
    return [SourceEntry(str(name), raw, f"in {path}") for name, raw in content.items()]


def read_environment(env: Mapping[str, str]) -> list[SourceEntry]:
    """Entries of `LMKV_*` variables, except `LMKV_CONFIG_FILE` and those that Kubernetes sets for services."""
    return _read_variables(env, PREFIX, FILE_VARIABLE)


def read_lmcache(env: Mapping[str, str]) -> list[SourceEntry]:
    """Entries of LMCache: the file that `LMCACHE_CONFIG_FILE` names, then the `LMCACHE_*` variables, which override it.

    Raises `ConfigError` if the file cannot be read.
    """
    path = env.get(LMCACHE_FILE_VARIABLE)
    entries = read_file(Path(path), LMCACHE_FILE_VARIABLE) if path else []
    return entries + [entry for entry in _read_variables(env, LMCACHE_PREFIX, LMCACHE_FILE_VARIABLE) if entry.raw]


def _read_variables(env: Mapping[str, str], prefix: str, file_variable: str) -> list[SourceEntry]:
    return [
        SourceEntry(name.removeprefix(prefix).lower(), raw, "in the environment", lambda key: prefix + key.upper())
        for name, raw in env.items()
        if name.startswith(prefix)
        and name != file_variable
        and not _SERVICE_LINK.fullmatch(name)
        and not (name.endswith("_PORT") and _SERVICE_URL.fullmatch(raw))
    ]


def read_flags(flags: Mapping[str, Any], place: str) -> list[SourceEntry]:
    """Entries of flags by key. `place` is their source if not a command line, such as `kv_connector_extra_config`."""
    if place:
        return [SourceEntry(name, raw, f"in {place}") for name, raw in flags.items()]
    return [SourceEntry(name, raw, "on the command line", flag) for name, raw in flags.items()]


def _strict_loader() -> type[yaml.SafeLoader]:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Refuses duplicate keys, of which YAML would use the last, and mappings that merges make too large."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MAX_VALUES:
                raise yaml.MarkedYAMLError(problem="a mapping has too many keys", problem_mark=node.start_mark)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for name, _ in node.value:
                if not isinstance(name.value, str):  # a list or a mapping: refused below
                    continue
                if name.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{name.value} is set twice", problem_mark=name.start_mark)
                seen.add(name.value)
            return super().construct_mapping(node, deep)

    return StrictLoader


def _is_bounded(content: object) -> bool:
    """Whether content has at most `MAX_VALUES` values; a value that several aliases name counts each time."""
    pending, count = [content], 0
    while pending and count <= MAX_VALUES:
        value = pending.pop()
        count += 1
        if isinstance(value, dict):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
    return count <= MAX_VALUES


def _one_line(error: Exception) -> str:
    """A YAML error without the excerpt: `line 3: mapping values are not allowed here`."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}" if mark else problem


REPLACED = {
    "controller_reply_url": "one connection to coordinator_address carries both directions",
    "decoder_alloc_port": "the decode engine reports the instance of its node",
    "decoder_init_port": "the decode engine reports the instance of its node, which nodes find by the coordinator",
    "distributed_url": "peers connect to p2p_host and p2p_port",
    "enable_controller": "a coordinator is used if coordinator_address is set",
    "extra_config": "lmkv reads its keys at the top level only",
    "lmcache_rpc_port": "engine and node use a unix socket in runtime_dir",
    "lmcache_worker_heartbeat_time": "the coordinator's lease_ttl sets how often nodes report",
    "lmcache_worker_port": "one node serves all ranks, at p2p_port",
    "lmcache_worker_ports": "one node serves all ranks, at p2p_port",
    "lookup_backoff_time": "lookups wait for at most lookup_timeout",
    "p2p_lookup_ports": "p2p_port serves lookups too",
    "pd_peer_alloc_port": "the port of pd_peer_init_port also allocates memory",
    "pd_peer_query_port": "the port of pd_peer_init_port serves all RPCs",
    "pd_proxy_host": "a decode waits for the announced chunks; the proxy needs no notification",
    "pd_proxy_port": "a decode waits for the announced chunks; the proxy needs no notification",
    "proxy_host": "prefill engines do not call the proxy",
    "proxy_port": "prefill engines do not call the proxy",
    "remote_serde": "remote_codec has codecs of lmkv",
}
"""Keys of LMCache without a counterpart, and what replaces them. They are accepted with a notice."""


def spellings(cls: type[Config]) -> Mapping[str, tuple[str, Alias]]:
    """Key and alias of each spelling."""
    plain = {name: (name, Alias(name=name)) for name in keys(cls)}
    return plain | {alias.name: (name, alias) for name, declared in keys(cls).items() for alias in declared.aliases}


@cache
def known_spellings() -> frozenset[str]:
    """All spellings of all keys of all processes, and the keys in `REPLACED`."""
    processes = (NodeConfig, ConnectorConfig, CoordinatorConfig, ProxyConfig, WebhookConfig, ClientConfig)
    return frozenset(REPLACED).union(*(spellings(cls) for cls in processes))
