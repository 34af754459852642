"""The KvSpecs of tests: small ones, of which a test names only the fields that it is about."""

from __future__ import annotations

from lmkv.spec import NATIVE_TILES, KvSpec


def make_spec(**fields: object) -> KvSpec:
    """A spec of chunks of 32 tokens and 8192 bytes."""
    values: dict[str, object] = {
        "model_name": "small",
        "model_id": "small-weights",
        "kv_dtype": "float32",
        "layer_count": 2,
        "kv_head_count": 2,
        "head_size": 8,
        "chunk_size": 32,
    }
    return KvSpec(**(values | fields))  # type: ignore[arg-type]


def small_spec(**fields: object) -> KvSpec:
    """As `make_spec`, with a vocabulary, and in tiles: a chunk has 2 blocks of 16 tokens."""
    values: dict[str, object] = {
        "format": NATIVE_TILES,
        "tile_backend": "TEST",
        "block_size": 16,
        "vocab_size": 1000,
    }
    return make_spec(**(values | fields))


LLAMA = make_spec(
    model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=16, vocab_size=128256
)
"""A model that several instances serve."""
