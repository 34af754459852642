"""Configuration files of LMCache that must work as they are, and what tests of the configuration share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lmkv.config import (
    ClientConfig,
    Config,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    PickerConfig,
    ProxyConfig,
    WebhookConfig,
    load,
)
from lmkv.errors import ConfigError

PROCESSES = (NodeConfig, ConnectorConfig, CoordinatorConfig, ProxyConfig, PickerConfig, WebhookConfig, ClientConfig)


EMPTY: Mapping[str, str] = {}


LMCACHE_P2P = """\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 100
enable_async_loading: True
# P2P configurations
enable_p2p: True
p2p_host: "localhost"
p2p_init_ports: 8200
p2p_lookup_ports: 8201
transfer_channel: "nixl"
# Controller configurations
enable_controller: True
lmcache_instance_id: "lmcache_instance_1"
controller_pull_url: "localhost:8300"
controller_reply_url: "localhost:8400"
lmcache_worker_ports: 8500
extra_config:
lookup_backoff_time: 0.001
"""


LMCACHE_PREFILL = """\
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "localhost"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""


LMCACHE_DECODE = """\
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: 7300
pd_peer_alloc_port: 7400
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""


LMCACHE_LOOKUP = """\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 5
enable_controller: True
lmcache_instance_id: "lmcache_default_instance"
controller_url: "localhost:9001"
distributed_url: "localhost:8002"
lmcache_worker_port: 8001
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "lmkv.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(cls: type[Config] = ConnectorConfig, **places: Any) -> str:
    """The one line that a configuration is refused with."""
    with pytest.raises(ConfigError) as raised:
        load(cls, **{"env": EMPTY, **places})
    assert "\n" not in str(raised.value)
    return str(raised.value)
