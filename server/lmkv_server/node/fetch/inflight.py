"""The chunks that fetches of this node are transferring now, so that no chunk is transferred twice. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.tiers.progress import Progress


class InflightFetches:
    """Which fetch transfers each chunk, and which other fetches wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[ChunkKey, list[tuple[Progress, int]]] = {}
        self._owners: dict[ChunkKey, Progress | None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting

    def begin(self, keys: Iterable[ChunkKey], progress: Progress | None = None) -> None:
        """A fetch transfers these chunks; each must be ended by `commit` or `end`."""
        for key in keys:
            assert key not in self._waiting, "a chunk is transferred twice"
            self._waiting[key] = []
            self._owners[key] = progress

    def subscribe(self, progress: Progress) -> bool:
        """Adds to the fetch what other fetches transfer and it misses, once that arrives; whether there is any."""
        subscribed = False
        for index in progress.missing:
            key = progress.keys[index]
            waiting = self._waiting.get(key)
            if waiting is not None and self._owners[key] is not progress:
                subscribed = True
                if (progress, index) not in waiting:
                    waiting.append((progress, index))
        return subscribed

    def commit(self, chunk: Chunk, instance_id: str) -> None:
        """The chunk has arrived from a peer and is in the tier: adds it to the fetches that wait for it."""
        self._owners.pop(chunk.key, None)
        for progress, index in self._waiting.pop(chunk.key, ()):
            progress.add([(index, chunk)], instance_id)
            progress.changed.set()

    def end(self, keys: Iterable[ChunkKey]) -> None:
        """The chunks of these that have not arrived are no longer transferred: notifies the fetches that wait."""
        for key in keys:
            self._owners.pop(key, None)
            for progress, _ in self._waiting.pop(key, ()):
                progress.changed.set()
