"""Makes the store that `remote_url` names. Used by `tiers.build`."""

from __future__ import annotations

from importlib.util import find_spec

from lmkv.config import NodeConfig
from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError
from lmkv_server.node.tiers.remote.store import RemoteStore


def store_for(config: NodeConfig) -> RemoteStore:
    """The store of `remote_url`; nothing is connected yet. Raises `ConfigError` if it needs what is not installed."""
    url = parse_remote_url(config.remote_url)
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        raise ConfigError(
            f"remote_url: {url.shown} needs {package}, which is not installed; "
            f"pip install '.[{extra}]' in a clone of lmkv",
            key="remote_url",
        )
    if url.bucket:
        from lmkv_server.node.tiers.remote.s3 import S3Store

        return S3Store(url, endpoint_url=config.remote_endpoint_url, timeout_seconds=config.remote_timeout)
    from lmkv_server.node.tiers.remote.valkey import ValkeyStore

    return ValkeyStore(url, timeout_seconds=config.remote_timeout, ttl_seconds=config.remote_ttl)
