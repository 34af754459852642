"""What a store must provide to be the remote tier's. Used by `StoreBackend`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class StoreRefused(OSError):
    """The store answered with a refusal: no room, no permission, no such bucket."""


class RemoteStore(Protocol):
    """Named bytes that many nodes share. Methods block, and may be called on any thread.

    Each ends within a small multiple of the timeout that the store was made with. All raise `StoreRefused` if the store
    refuses, and another `OSError` if it does not answer as expected. No message contains a secret.
    """

    @property
    def shown(self) -> str:
        """What logs and errors call it."""

    @property
    def one_per_request(self) -> bool:
        """Whether each name in `sizes` costs a request; then a lookup asks for few of them."""

    def open(self) -> None:
        """Returns once the store has answered."""

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Sizes of objects in bytes, 0 of an absent one."""

    def get(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Fills the parts in order from an object; False if there is none of exactly that size."""

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Stores the parts as one object; False if there is one of that name already, which stays."""

    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; absent ones are ignored."""

    def names(self, prefix: str) -> Iterator[list[str]]:
        """Names that begin with `prefix`, in pages. Those that are stored or removed meanwhile may be missing."""

    def close(self) -> None:
        """Closes idle connections. Idempotent."""
