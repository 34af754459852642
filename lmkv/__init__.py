"""Servers, clients and tools of lmkv share this package: keys, specs, errors, configuration. This is the public API.

Names are imported on first use, so that `import lmkv` is fast and loads neither NumPy nor gRPC, torch or NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig
    from lmkv.errors import ConfigError, LmkvError, Unreachable
    from lmkv.keys import ChunkKey, KeyChain, as_tokens, chunk_keys, root_key
    from lmkv.spec import KvSpec

__version__ = "0.1.0"

__all__ = [
    "ChunkKey",
    "ConfigError",
    "ConnectorConfig",
    "CoordinatorConfig",
    "KeyChain",
    "KvSpec",
    "LmkvError",
    "NodeConfig",
    "Unreachable",
    "__version__",
    "as_tokens",
    "chunk_keys",
    "root_key",
]

_HOMES = {
    "lmkv.config": ("ConnectorConfig", "CoordinatorConfig", "NodeConfig"),
    "lmkv.errors": ("ConfigError", "LmkvError", "Unreachable"),
    "lmkv.keys": ("ChunkKey", "KeyChain", "as_tokens", "chunk_keys", "root_key"),
    "lmkv.spec": ("KvSpec",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmkv' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
