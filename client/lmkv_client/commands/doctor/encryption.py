"""Checks the file of keys that encrypt chunks at rest."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from lmkv.auth.encryption_keys import KEY, read_encryption_keys
from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv_client.commands.doctor.finding import Finding, fail, ok


def check_encryption(config: NodeConfig) -> Iterator[Finding]:
    """Whether the node can use the file; nothing, where none is configured."""
    if not config.encryption_key_file:
        return
    if find_spec("cryptography") is None:
        yield fail(KEY, "it needs cryptography, which is not installed; pip install '.[encryption]' in a clone of lmkv")
        return
    try:
        keys = read_encryption_keys(config.encryption_key_file)
    except ConfigError as error:
        yield fail(KEY, str(error).removeprefix(f"{KEY}: "))
    else:
        path, readable = config.encryption_key_file, ", ".join(key.name for key in keys)
        yield ok(KEY, f"{path}: new chunks are encrypted with key {keys[0].name}; readable are those of {readable}")
