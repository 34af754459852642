"""Makes `"kv_connector": "LMKVConnector"` known to vLLM. Called through the entry point `vllm.general_plugins`."""

from __future__ import annotations

import os

PROCESSORS = frozenset(os.sched_getaffinity(0))
"""Processors this process may use, read before vLLM pins its threads to some of them."""

NAME = "LMKVConnector"


def register() -> None:
    """Registers the connector; vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmkv_client.connector.connector", NAME)
