"""All spellings of configuration keys: names, aliases, and keys of LMCache that are accepted and ignored."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache

from lmkv.config.client import ClientConfig
from lmkv.config.connector import ConnectorConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.node import NodeConfig
from lmkv.config.proxy import ProxyConfig
from lmkv.config.schema import Alias, Config, keys

REPLACED = {
    "controller_reply_url": "one connection to coordinator_address carries both directions",
    "decoder_alloc_port": "the decode engine says which instance its node is",
    "decoder_init_port": "the decode engine says which instance its node is; nodes find it by the coordinator",
    "distributed_url": "peers meet at p2p_host and p2p_port",
    "enable_controller": "a coordinator is used if coordinator_address is set",
    "extra_config": "lmkv reads its keys at the top level only",
    "lmcache_rpc_port": "engine and node meet at a unix socket in runtime_dir",
    "lmcache_worker_heartbeat_time": "the coordinator's lease_ttl decides how often nodes report",
    "lmcache_worker_port": "one node serves all ranks, at p2p_port",
    "lmcache_worker_ports": "one node serves all ranks, at p2p_port",
    "lookup_backoff_time": "lookups wait for their answer, at most lookup_timeout",
    "p2p_lookup_ports": "p2p_port serves lookups too",
    "pd_peer_alloc_port": "the port of pd_peer_init_port hands out memory, too",
    "pd_peer_query_port": "the port of pd_peer_init_port answers everything",
    "pd_proxy_host": "a decode waits for what it was promised; nobody tells the proxy",
    "pd_proxy_port": "a decode waits for what it was promised; nobody tells the proxy",
    "proxy_host": "prefill engines answer the proxy's requests, they do not call it",
    "proxy_port": "prefill engines answer the proxy's requests, they do not call it",
    "remote_serde": "chunks are in the store as they are in memory",
}
"""LMCache's keys that have no counterpart, and what is in their place. They are accepted, with a notice."""


def spellings(cls: type[Config]) -> Mapping[str, tuple[str, Alias]]:
    """The key that each spelling means, and how its value is turned into the key's."""
    plain = {name: (name, Alias(name=name)) for name in keys(cls)}
    return plain | {alias.name: (name, alias) for name, declared in keys(cls).items() for alias in declared.aliases}


@cache
def known_spellings() -> frozenset[str]:
    """Every spelling of every key of every process, and the keys that were replaced."""
    processes = (NodeConfig, ConnectorConfig, CoordinatorConfig, ProxyConfig, ClientConfig)
    return frozenset(REPLACED).union(*(spellings(cls) for cls in processes))


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, if one of the known words is like this one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
