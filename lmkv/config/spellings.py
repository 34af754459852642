"""All spellings of configuration keys: names, aliases, and keys of LMCache that are accepted and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from lmkv.config.client import ClientConfig, WebhookConfig
from lmkv.config.connector import ConnectorConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.node import NodeConfig
from lmkv.config.proxy import ProxyConfig
from lmkv.config.schema import Alias, Config, keys

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
    "remote_serde": "chunks are stored as they are in memory",
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
