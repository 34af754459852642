"""What a store must do to be the remote tier's, and which one a URL means. Used by `BackendHealth`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

from lmkv.config import NodeConfig
from lmkv.errors import ConfigError
from lmkv.remote_url import parse_remote_url


class Refused(OSError):
    """The store answered, but did not do it: no room, no right, no such bucket."""


class RemoteStore(Protocol):
    """Named bytes that many nodes share. Methods block, and any thread may call them.

    Each ends by itself within the seconds that the store was made with, or some times that. All raise `Refused` if the
    store says no, and another `OSError` if it does not answer as it should. No message holds a secret.
    """

    @property
    def shown(self) -> str:
        """What people call it."""

    @property
    def asks_singly(self) -> bool:
        """Whether each name costs a request of its own: then few are better asked about."""

    def open(self) -> None:
        """Returns once the store has answered."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """The lengths of objects, 0 of one that is not there."""

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fills the parts, one after the other, from an object; False if there is none of just that length."""

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Makes an object of the parts; False if there is one of that name already, which stays."""

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects, those of them that are there."""

    def names(self, root: str) -> Iterator[list[str]]:
        """The names that begin so, some at a time; those that come and go meanwhile may be among them or not."""

    def close(self) -> None:
        """Lets go of every connection that nobody uses. Idempotent."""


def store_for(config: NodeConfig) -> RemoteStore:
    """The store of `remote_url`; nothing is connected yet. Raises `ConfigError` if it needs what is not installed."""
    url = parse_remote_url(config.remote_url)
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        raise ConfigError(
            f"remote_url: {url.shown} needs {package}, which is not installed; pip install 'lmkv[{extra}]'",
            key="remote_url",
        )
    if url.bucket:
        from lmkv_server.node.tiers.remote.s3 import S3Store

        return S3Store(url, endpoint_url=config.remote_endpoint_url, timeout_seconds=config.remote_timeout)
    from lmkv_server.node.tiers.remote.valkey import ValkeyStore

    return ValkeyStore(url, timeout_seconds=config.remote_timeout, ttl_seconds=config.remote_ttl)
