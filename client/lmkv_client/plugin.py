"""Makes `"kv_connector": "LMKVConnector"` and `"ec_connector": "LMKVECConnector"` known to vLLM.

Called through the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from lmkv.errors import ConfigError, LmkvError
from lmkv_client import preflight, startup_error
from lmkv_client import processors as processors  # reads them before vLLM pins its threads to some of them
from lmkv_client.preflight import ENCODER_CONNECTOR as ENCODER_NAME
from lmkv_client.preflight import KV_CONNECTOR as NAME

MODULE = "lmkv_client.connector.vllm_connector"
ENCODER_MODULE = "lmkv_client.connector.encoder.ec_connector"
OLDEST_VLLM = (0, 31)
"""The first supported minor version of vLLM; docs/reference/compatibility.md lists what was tested."""
NEWEST_VLLM = (0, 33)
"""The last minor version that lmkv was tested with. Later versions are compared with what the connector relies on."""
SERVED_NAMES = "lmkv_served_names"
"""Attribute of vLLM's `ModelConfig`: all names of `--served-model-name`, of which its own field keeps the first."""
CONFIGURED_AT = "lmkv_configured_at"
"""Attribute of vLLM's `ModelConfig`: when it was made, in seconds since 1970. vLLM loads the weights after that."""


def register() -> None:
    """Registers the connectors; vLLM calls this in each of its processes, perhaps more than once.

    Under a vLLM that cannot work, an engine that is configured with one of them fails with one line. Engines without
    them are not affected.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    _register(KVConnectorFactory, NAME, MODULE)
    with suppress(ModuleNotFoundError):  # vLLM before 0.32 has no such connectors, or others
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

        _register(ECConnectorFactory, ENCODER_NAME, ENCODER_MODULE)
    _follow_command_line()
    startup_error.print_at_exit()


def _register(factory: Any, name: str, module: str) -> None:
    from vllm import __version__

    if name in factory._registry:
        return
    if error := version_error(__version__, name):
        factory._registry[name] = functools.partial(_refuse, error)
    elif is_newer(__version__):
        factory._registry[name] = functools.partial(_load_if_compatible, __version__, name, module)
    else:
        factory.register_connector(name, module, name)


def version_error(version: str, name: str = NAME) -> ConfigError | None:
    """The error if a version of vLLM is too old. A version without numbers, of a source tree, is not checked."""
    numbers = _minor(version)
    if numbers is None or numbers >= OLDEST_VLLM:
        return None
    return ConfigError(
        f"vLLM {version} is too old for this version of lmkv, which needs vllm>={OLDEST_VLLM[0]}.{OLDEST_VLLM[1]}: "
        f"install another version of either, or {_removal(name)}"
    )


def _removal(name: str) -> str:
    return f"remove {name} from {'--ec-transfer-config' if name == ENCODER_NAME else '--kv-transfer-config'}"


def is_newer(version: str) -> bool:
    """Whether a version of vLLM is newer than those that lmkv was tested with."""
    numbers = _minor(version)
    return numbers is not None and numbers > NEWEST_VLLM


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


@functools.cache  # vLLM asks for the class several times, and the user reads the warning once
def _load_if_compatible(version: str, name: str, module: str) -> type:
    """A connector's class, if this vLLM has all that it relies on; else the engine ends."""
    from lmkv_client import vllm_contract

    if moved := vllm_contract.moved(encoder_cache=name == ENCODER_NAME):
        _refuse(
            ConfigError(
                f"vLLM {version} is newer than this version of lmkv, and lacks what the connector relies on "
                f"({'; '.join(moved[:3])}{f'; {len(moved) - 3} more' if len(moved) > 3 else ''}): install "
                f"vllm<{NEWEST_VLLM[0]}.{NEWEST_VLLM[1] + 1} or a newer lmkv, or {_removal(name)}"
            )
        )
    from vllm.logger import init_logger

    init_logger("vllm.lmkv").warning(
        "vLLM %s is newer than lmkv was tested with (%d.%d); it has all that the connector relies on",
        version,
        *NEWEST_VLLM,
    )
    connector: type = getattr(importlib.import_module(module), name)
    return connector


def _refuse(error: LmkvError) -> NoReturn:
    """Ends the start of an engine whose vLLM or configuration cannot work with the connector."""
    startup_error.record(error)
    raise error


def _follow_command_line() -> None:
    """Has vLLM's command line check the connectors' configuration first, before a model is loaded, and pass all served
    names and the time on to the engine, where it makes the model's configuration."""
    arg_utils = sys.modules.get("vllm.engine.arg_utils")  # only where there is a command line
    engine_args: Any = getattr(arg_utils, "EngineArgs", None)
    create = getattr(engine_args, "create_model_config", None)
    if create is None or hasattr(create, SERVED_NAMES):
        return

    @functools.wraps(create)
    def create_model_config(self: Any, *args: Any, **options: Any) -> Any:
        _check(getattr(self, "kv_transfer_config", None), getattr(self, "ec_transfer_config", None))
        began = time.time()
        model = create(self, *args, **options)
        setattr(model, CONFIGURED_AT, began)
        setattr(model, SERVED_NAMES, self.served_model_name)
        return model

    setattr(create_model_config, SERVED_NAMES, True)
    engine_args.create_model_config = create_model_config


def _check(kv_transfer_config: Any, ec_transfer_config: Any) -> None:
    """Ends the start of an engine whose connectors, or the node that they would start, are configured wrongly."""
    try:
        for config in preflight.configs(kv_transfer_config, ec_transfer_config):
            preflight.check(config)
            if path := preflight.waits_for_node(config):
                from vllm.logger import init_logger

                init_logger("vllm.lmkv").warning(
                    "node_address: no node listens at %s yet; everything is computed until one does", path
                )
    except LmkvError as error:
        _refuse(error)
