"""The configuration of each process: a frozen dataclass with its keys, and the sources of their values.

Flags override `LMKV_<KEY>` in the environment, which overrides the YAML file. All processes may share one file: keys of
other processes are ignored, unknown keys are refused. `docs/reference/configuration.md` lists the keys. Imports
`lmkv.auth`, `lmkv.runtime` and `lmkv.plugins`. Start with `schema.Config`.
"""

from lmkv.config.connector import ClientConfig, ConnectorConfig, WebhookConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.node import NodeConfig
from lmkv.config.resolve import add_arguments, as_written, from_arguments, load, to_comparison, to_environment
from lmkv.config.router import PickerConfig, ProxyConfig
from lmkv.config.schema import Config, keys

__all__ = [
    "ClientConfig",
    "Config",
    "ConnectorConfig",
    "CoordinatorConfig",
    "NodeConfig",
    "PickerConfig",
    "ProxyConfig",
    "WebhookConfig",
    "add_arguments",
    "as_written",
    "from_arguments",
    "keys",
    "load",
    "to_comparison",
    "to_environment",
]
