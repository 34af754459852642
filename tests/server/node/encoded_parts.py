"""Chunks of real numbers for tiers with a codec, and how far a codec may change them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmkv.spec import KvSpec
from lmkv_server.node.tiers.codec import ChunkCodec
from tests.server.node.disk_parts import Chunks
from tests.support.specs import small_spec

EXACT = small_spec()
LOSSY = small_spec(accepts_lossy=True)
TOLERANCE = {"fp8": 2**-4, "int8": 1 / 250, "int4": 1 / 14, "zstd": 0.0}
"""Most error of an element, as a fraction of the greatest magnitude in its group."""


@dataclass(frozen=True)
class Specs:
    """Specs that a node knows."""

    known: tuple[KvSpec, ...] = (EXACT, LOSSY)

    def spec(self, fingerprint: bytes) -> KvSpec | None:
        return next((spec for spec in self.known if spec.fingerprint == fingerprint), None)


def codec(name: str, *known: KvSpec) -> ChunkCodec:
    """A codec of a node that knows both specs, or these."""
    return ChunkCodec(name, Specs(known or (EXACT, LOSSY)))


def numbers(number: int, size_bytes: int) -> bytes:
    """Float32 elements of a chunk, whose planes differ in magnitude."""
    values = np.random.default_rng(number).standard_normal(size_bytes // 4, np.float32)
    scales = np.repeat(np.exp2(np.arange(-(-values.size // 128)) % 7 - 3), 128)[: values.size]
    scaled: NDArray[np.float32] = (values * scales).astype(np.float32)
    return scaled.tobytes()


def chunks_for(name: str, spec: KvSpec = LOSSY) -> Chunks:
    """Full chunks of an engine with this spec, read from a tier with the codec of this name."""
    tolerance = TOLERANCE[name] if spec.accepts_lossy else 0.0

    def is_same(found: bytes, stored: bytes) -> bool:
        one, other = (np.frombuffer(each, np.float32).reshape(-1, 128) for each in (found, stored))
        return bool((np.abs(one - other) <= tolerance * np.abs(other).max(axis=1, keepdims=True)).all())

    return Chunks(spec=spec, token_count=spec.chunk_size, content=numbers, is_same=is_same)
