"""Makes `"kv_connector": "LMKVConnector"` known to vLLM. Called through the entry point `vllm.general_plugins`."""

from __future__ import annotations

import functools
import re
import sys
import time
from typing import Any, NoReturn

from lmkv.errors import ConfigError
from lmkv_client import processors as processors  # reads them before vLLM pins its threads to some of them
from lmkv_client import startup_error

NAME = "LMKVConnector"
MODULE = "lmkv_client.connector.vllm_connector"
OLDEST_VLLM = (0, 31)
"""The first supported minor version of vLLM; docs/reference/compatibility.md lists what was tested."""
NEXT_VLLM = (0, 33)
"""The first minor version after the supported ones."""
SERVED_NAMES = "lmkv_served_names"
"""Attribute of vLLM's `ModelConfig`: all names of `--served-model-name`, of which its own field keeps the first."""
CONFIGURED_AT = "lmkv_configured_at"
"""Attribute of vLLM's `ModelConfig`: when it was made, in seconds since 1970. vLLM loads the weights after that."""


def register() -> None:
    """Registers the connector; vLLM calls this in each of its processes, perhaps more than once.

    Under a vLLM that is not supported, an engine that is configured with the connector fails with one line. Engines
    without it are not affected.
    """
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        if error := version_error(__version__):
            KVConnectorFactory._registry[NAME] = functools.partial(_refuse, error)
        else:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    _keep_served_names()
    startup_error.print_at_exit()


def version_error(version: str) -> ConfigError | None:
    """The error if a version of vLLM is not supported. A version without numbers, of a source tree, is not checked."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or OLDEST_VLLM <= (int(numbers[1]), int(numbers[2])) < NEXT_VLLM:
        return None
    supported = f">={OLDEST_VLLM[0]}.{OLDEST_VLLM[1]},<{NEXT_VLLM[0]}.{NEXT_VLLM[1]}"
    return ConfigError(
        f"vLLM {version} is not supported by this version of lmkv, which supports vllm{supported}: "
        "install another version of either, or remove LMKVConnector from --kv-transfer-config"
    )


def _refuse(error: ConfigError) -> NoReturn:
    """Takes the place of the connector's class under a vLLM that is not supported."""
    startup_error.record(error)
    raise error


def _keep_served_names() -> None:
    """Has vLLM's command line pass all served names, and the time, on to the engine, where it makes the model's
    configuration."""
    arg_utils = sys.modules.get("vllm.engine.arg_utils")  # only where there is a command line
    engine_args: Any = getattr(arg_utils, "EngineArgs", None)
    create = getattr(engine_args, "create_model_config", None)
    if create is None or hasattr(create, SERVED_NAMES):
        return

    @functools.wraps(create)
    def create_model_config(self: Any, *args: Any, **options: Any) -> Any:
        began = time.time()
        model = create(self, *args, **options)
        setattr(model, CONFIGURED_AT, began)
        setattr(model, SERVED_NAMES, self.served_model_name)
        return model

    setattr(create_model_config, SERVED_NAMES, True)
    engine_args.create_model_config = create_model_config
