"""An engine of a small model for tests of the engine API: its chunks, their bytes, how it stores and loads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv_client.engine import Engine, Extent, Written
from tests.client.engine.nodes import connector_config
from tests.support.specs import make_spec
from tests.waiting import WAIT_SECONDS

SPEC = make_spec(vocab_size=1000)
"""Its chunks have 8 KiB."""


class Attach(Protocol):
    def __call__(self, *, spec: KvSpec = SPEC, rank: int = 0, rank_count: int = 1, **settings: object) -> Engine: ...


def attach_engine(
    runtime_dir: Path, *, spec: KvSpec = SPEC, rank: int = 0, rank_count: int = 1, **settings: Any
) -> Engine:
    """An engine at a node of its own in `runtime_dir`, or of the same `instance_id`."""
    return Engine.attach(spec, config=connector_config(runtime_dir, **settings), rank=rank, rank_count=rank_count)


def prompt(chunk_count: int, first: int = 0, size: int = SPEC.chunk_size) -> list[int]:
    """Tokens of a number of chunks; prompts that differ in `first` share none."""
    return [(first * 7 + index) % 1000 for index in range(chunk_count * size)]


def content(key: ChunkKey, size_bytes: int = SPEC.chunk_bytes) -> NDArray[np.uint64]:
    """The bytes of the chunk of a key, as words."""
    return np.arange(size_bytes // 8, dtype=np.uint64) + np.uint64(int.from_bytes(key[:7], "little"))


def words(extent: Extent) -> NDArray[np.uint64]:
    """The bytes of an extent, as words."""
    return np.frombuffer(extent.view, np.uint64)


def store(engine: Engine, keys: Sequence[ChunkKey], *, parent: bytes = b"") -> int:
    """Stores the chunks of a prompt whose keys these are; the number that found an extent."""
    extents = engine.reserve(len(keys), timeout=WAIT_SECONDS)
    for key, extent in zip(keys, extents, strict=False):
        words(extent)[:] = content(key)
    engine.commit(Written.chain(keys, extents, parent=parent))
    return len(extents)


def load(engine: Engine, keys: Sequence[ChunkKey]) -> int:
    """Loads what is held of a prompt, and checks each byte; the number of chunks."""
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        count = 0
        for key, extent in zip(keys, held.load(timeout=WAIT_SECONDS), strict=False):
            assert np.array_equal(words(extent), content(key))
            count += 1
        return count


def all_extents(engine: Engine) -> int:
    """The number of extents that the engine gets if it wants all; it puts them back."""
    extents = engine.reserve(1000, timeout=1.0)
    engine.put_back(extents)
    return len(extents)
