"""Chunk keys in one call: those of `lmkv.keys`, and of the golden vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv import keys
from lmkv.keys import ChunkKey, Tokens
from lmkv_kernels import _host, chunk_keys

GOLDEN = json.loads((Path(__file__).parents[1] / "lmkv" / "golden_keys.json").read_text(encoding="utf-8"))
ROOT = bytes(range(16))


def made(tokens: Tokens, root: bytes, chunk_size: int, portable: bool) -> bytes:
    return _host.chunk_keys(tokens, np.frombuffer(root, np.uint8), chunk_size, portable)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("case", [c for c in GOLDEN["chains"] if not c["extras"]], ids=lambda case: str(case["name"]))
def test_golden_vectors_hold(case: Mapping[str, Any], portable: bool) -> None:
    tokens, size = np.array(case["tokens"], np.uint32), case["chunk_size"]
    if not case["partial"]:
        tokens = tokens[: tokens.size // size * size]
    assert made(tokens, bytes.fromhex(case["root"]), size, portable).hex() == "".join(case["keys"])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 70), st.booleans())
def test_they_are_those_of_the_chain_whatever_the_length_of_a_chunk(
    seed: int, token_count: int, chunk_size: int, portable: bool
) -> None:
    tokens = np.random.default_rng(seed).integers(0, 2**32 - 1, token_count, dtype=np.uint32)
    expected = keys.join_keys(keys.chunk_keys(tokens, ChunkKey(ROOT), chunk_size, partial=True))
    assert made(tokens, ROOT, chunk_size, portable) == expected
    assert chunk_keys(tokens, ROOT, chunk_size) == expected


@pytest.mark.parametrize(
    ("tokens", "root", "chunk_size", "says"),
    [
        (np.zeros(4, np.int64), ROOT, 2, "flat contiguous array of u32"),
        (np.zeros((2, 2), np.uint32), ROOT, 2, "flat contiguous array of u32"),
        (np.zeros(8, np.uint32)[::2], ROOT, 2, "flat contiguous array of u32"),
        (np.zeros(4, np.uint32), ROOT[1:], 2, "root must be a key of 16 bytes, not 15"),
        (np.zeros(4, np.uint32), ROOT, 0, "chunk_size must be 1 or more, not 0"),
    ],
)
def test_what_makes_no_keys_is_refused(tokens: Any, root: bytes, chunk_size: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chunk_keys(tokens, root, chunk_size)
