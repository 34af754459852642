"""What a store must do to be the remote tier's, and which one a URL means. Used by `RemoteLink`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

from lmkv.errors import ConfigError
from lmkv.remote_url import RemoteUrl


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

    def open(self) -> None:
        """Returns once the store has answered."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """The lengths of objects, 0 of one that is not there; what follows such a one may be left out."""

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fills the parts, one after the other, from an object; False if there is none of just that length."""

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Makes an object of the parts; False if there is one of that name already, which stays."""

    def remove(self, names: Sequence[str]) -> int:
        """Removes objects; how many of them were there, as far as the store says."""

    def names(self, root: str) -> Iterator[list[str]]:
        """The names that begin so, some at a time; those that come and go meanwhile may be among them or not."""

    def close(self) -> None:
        """Lets go of every connection that nobody uses. Idempotent."""


def store_for(url: RemoteUrl, *, endpoint_url: str, timeout_seconds: float, ttl_seconds: float) -> RemoteStore:
    """The store at a URL; nothing is connected yet. Raises `ConfigError` if it needs what is not installed."""
    package, extra = ("botocore", "s3") if url.bucket else ("valkey", "valkey")
    if find_spec(package) is None:
        raise ConfigError(
            f"remote_url: {url.shown} needs {package}, which is not installed; pip install 'lmkv[{extra}]'",
            key="remote_url",
        )
    if url.bucket:
        from lmkv_server.node.remote_s3 import S3Store

        return S3Store(url, endpoint_url=endpoint_url, timeout_seconds=timeout_seconds)
    from lmkv_server.node.remote_valkey import ValkeyStore

    return ValkeyStore(url, timeout_seconds=timeout_seconds, ttl_seconds=ttl_seconds)
