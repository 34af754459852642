"""A tier of another package: chunks in a folder that hosts share, as on a network file system.

It is a store for `RemoteTier`, which looks up, reads, verifies, writes and recovers. Its options: `folder`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv_server.node.tiers.base import TierUsage
from lmkv_server.node.tiers.build import TierContext
from lmkv_server.node.tiers.remote.tier import RemoteTier


class FolderStore:
    """A `RemoteStore`: a file for each object."""

    one_per_request = False
    pads_headers = False
    evicted_count = 0

    def __init__(self, folder: Path) -> None:
        self.shown = str(folder)
        self._folder = folder

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def sizes(self, names: Sequence[str]) -> list[int]:
        paths = [self._path(name) for name in names]
        return [path.stat().st_size if path.exists() else 0 for path in paths]

    def get(self, name: str, parts: Sequence[memoryview]) -> int:
        path = self._path(name)
        if not path.exists() or path.stat().st_size > sum(map(len, parts)):
            return 0
        with path.open("rb") as file:
            return sum(file.readinto(part) for part in parts)

    def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        path = self._path(name)
        if path.exists():
            return False
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(b"".join(parts))
        unfinished.rename(path)
        return True

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def names(self, prefix: str) -> Iterator[list[str]]:
        names = [path.name.replace("+", "/") for path in self._folder.iterdir() if not path.suffix]
        yield [name for name in names if name.startswith(prefix)]

    def close(self) -> None:
        pass

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "+")


class FolderTier(RemoteTier):
    """Also says how much is in it."""

    def usage(self) -> TierUsage:
        """What this node has written."""
        stats = self.stats()
        return TierUsage(capacity_bytes=0, used_bytes=stats.written_bytes, chunk_count=stats.written_chunks)


def make_tier(context: TierContext) -> FolderTier:
    """The entry point. Raises `ConfigError` if `folder` is missing."""
    folder = context.options.get("folder")
    if not folder:
        raise ConfigError(f"tiers: {context.name} needs folder", key="tiers")
    return FolderTier(
        FolderStore(Path(folder)),
        context.cache,
        context.name,
        lookup_seconds=5.0,
        encryption=context.encryption(context.name),
    )
