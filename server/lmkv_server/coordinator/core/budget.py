"""Limits the bytes that a tenant's instances make a coordinator store, per instance and in total. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmkv.errors import Full

RETRY_SECONDS = 5.0
"""Retry delay of what did not fit."""


class Budget:
    """Sizes of items by owner, the id of an instance. The owner "" is the coordinator, limited by the total only."""

    def __init__(self, *, owner_bytes: int, total_bytes: int) -> None:
        self._owner_bytes = owner_bytes
        self._total_bytes = total_bytes
        self._items: dict[str, dict[str, int]] = {}
        self._used_by: dict[str, int] = {}
        self.used_bytes = 0
        """Total of all owners."""

    def items(self, owner: str) -> Iterator[str]:
        """The items of an owner, oldest first."""
        return iter(self._items.get(owner, {}))

    def fits(self, owner: str, item: str, size_bytes: int) -> bool:
        """Whether an item may have this size."""
        return self.owner_fits(owner, item, size_bytes) and (
            self.used_bytes + self._growth(owner, item, size_bytes) <= self._total_bytes
        )

    def owner_fits(self, owner: str, item: str, size_bytes: int) -> bool:
        """Whether an item may have this size within its owner's limit."""
        used = self._used_by.get(owner, 0) + self._growth(owner, item, size_bytes)
        return not owner or used <= self._owner_bytes

    def charge(self, owner: str, item: str, size_bytes: int) -> None:
        """Sets the size of an item. Raises `Full` if it does not fit."""
        if not self.fits(owner, item, size_bytes):
            bound = "all instances" if self.owner_fits(owner, item, size_bytes) else "one instance"
            limit = self._total_bytes if bound == "all instances" else self._owner_bytes
            raise Full(
                f"{item} of {size_bytes} bytes: the limit of {bound} is {limit} bytes; send less",
                retry_seconds=RETRY_SECONDS,
                field=item,
                limit=limit,
            )
        self.set(owner, item, size_bytes)

    def set(self, owner: str, item: str, size_bytes: int) -> None:
        """Sets the size of an item, whether it fits or not."""
        growth = self._growth(owner, item, size_bytes)
        self._items.setdefault(owner, {})[item] = size_bytes
        self._used_by[owner] = self._used_by.get(owner, 0) + growth
        self.used_bytes += growth

    def drop(self, owner: str, item: str) -> None:
        """Removes an item. Idempotent."""
        items = self._items.get(owner, {})
        size_bytes = items.pop(item, 0)
        self.used_bytes -= size_bytes
        if items:
            self._used_by[owner] -= size_bytes
        else:
            self._items.pop(owner, None)
            self._used_by.pop(owner, None)

    def drop_owner(self, owner: str) -> None:
        """Removes all items of an owner. Idempotent."""
        for item in list(self.items(owner)):
            self.drop(owner, item)

    def check(self) -> None:
        """Asserts that the sums are correct: for tests."""
        sums = {owner: sum(items.values()) for owner, items in self._items.items()}
        assert sums == self._used_by
        assert sum(sums.values()) == self.used_bytes

    def _growth(self, owner: str, item: str, size_bytes: int) -> int:
        return size_bytes - self._items.get(owner, {}).get(item, 0)
