"""The configuration of each process: one frozen dataclass, its keys, and how they get their values.

Defaults give way to the YAML file, that to `LMKV_<KEY>` in the environment, that to flags. All processes may share one
file: a key of another process is passed over, a key of none is refused. `docs/configuration.md` lists the keys.
"""

from lmkv.config.arguments import add_arguments, from_arguments
from lmkv.config.client import ClientConfig
from lmkv.config.connector import ConnectorConfig
from lmkv.config.coordinator import CoordinatorConfig
from lmkv.config.node import NodeConfig
from lmkv.config.proxy import ProxyConfig
from lmkv.config.resolve import as_written, load, to_comparison, to_environment
from lmkv.config.schema import Config, keys

__all__ = [
    "ClientConfig",
    "Config",
    "ConnectorConfig",
    "CoordinatorConfig",
    "NodeConfig",
    "ProxyConfig",
    "add_arguments",
    "as_written",
    "from_arguments",
    "keys",
    "load",
    "to_comparison",
    "to_environment",
]
