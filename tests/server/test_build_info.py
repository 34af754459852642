"""Every server exports its version."""

from __future__ import annotations

import platform
from pathlib import Path

from prometheus_client import generate_latest

from lmkv import __version__
from lmkv.config import CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.proxy import Proxy


async def test_all_servers_export_their_version(runtime_dir: Path) -> None:
    config = NodeConfig(
        instance_id="n",
        runtime_dir=str(runtime_dir),
        max_local_cpu_size="16MB",  # type: ignore[arg-type]
    )
    proxy = Proxy(ProxyConfig())
    picker = Picker(PickerConfig(engines=("http://localhost:8000",), policy="least_loaded"))
    sample = f'lmkv_build_info{{python_version="{platform.python_version()}",version="{__version__}"}} 1.0'
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator, Node(config) as node:
        for registry in (coordinator.metrics, node.metrics.registry, proxy.metrics, picker.metrics):
            assert sample in generate_latest(registry).decode().splitlines()
