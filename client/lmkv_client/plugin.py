"""Makes `"kv_connector": "LMKVConnector"` known to vLLM. Called through the entry point `vllm.general_plugins`."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from lmkv_client.startup_error import print_at_exit

PROCESSORS = frozenset(os.sched_getaffinity(0))
"""Processors this process may use, read before vLLM pins its threads to some of them."""

NAME = "LMKVConnector"
SERVED_NAMES = "lmkv_served_names"
"""Attribute of vLLM's `ModelConfig`: all names of `--served-model-name`, of which its own field keeps the first."""


def register() -> None:
    """Registers the connector; vLLM calls this in each of its processes, perhaps more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmkv_client.connector.vllm_connector", NAME)
    _keep_served_names()
    print_at_exit()


def _keep_served_names() -> None:
    """Has vLLM's command line pass all served names on to the engine, where it makes the model's configuration."""
    arg_utils = sys.modules.get("vllm.engine.arg_utils")  # only where there is a command line
    engine_args: Any = getattr(arg_utils, "EngineArgs", None)
    create = getattr(engine_args, "create_model_config", None)
    if create is None or hasattr(create, SERVED_NAMES):
        return

    @functools.wraps(create)
    def create_model_config(self: Any, *args: Any, **options: Any) -> Any:
        model = create(self, *args, **options)
        setattr(model, SERVED_NAMES, self.served_model_name)
        return model

    setattr(create_model_config, SERVED_NAMES, True)
    engine_args.create_model_config = create_model_config
