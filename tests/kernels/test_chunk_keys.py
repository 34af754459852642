"""Chunk keys are those of `lmkv.keys` and of the golden vectors, and token ids out of JSON those that `json` reads."""

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
from lmkv_kernels import _host, chunk_keys, token_ids

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


IDS = st.one_of(st.integers(0, 300), st.integers(0, 200_000), st.integers(0, 2**32 - 1))


@settings(deadline=None, max_examples=300)
@given(st.lists(IDS), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")]), st.sampled_from([None, 0, 3]))
def test_whole_numbers_are_read_as_json_reads_them(
    ids: list[int], separators: tuple[str, str], indent: int | None
) -> None:
    text = json.dumps(ids, separators=separators, indent=indent).encode()
    for surrounded in (text, b" \t\r\n" + text + b"\n "):
        assert token_ids(surrounded).tolist() == ids


@settings(deadline=None, max_examples=500)
@given(st.lists(IDS, min_size=20), st.integers(0, 400), st.sampled_from(list('0 ,-.x]"\n')), st.booleans())
def test_one_wrong_character_among_many_ids_is_noticed_wherever_it_stands(
    ids: list[int], place: int, character: str, spaced: bool
) -> None:
    text = json.dumps(ids, separators=(", " if spaced else ",", ":"))
    check_reads_like_json((text[:place] + character + text[place + 1 :]).encode())


@settings(deadline=None, max_examples=500)
@given(st.one_of(st.binary(max_size=40), st.text(alphabet='[]0123456789,. -+eE"{}:tx\n', max_size=40).map(str.encode)))
def test_it_takes_a_text_exactly_if_it_is_a_json_list_of_such_numbers(text: bytes) -> None:
    check_reads_like_json(text)


def check_reads_like_json(text: bytes) -> None:
    try:
        value: Any = json.loads(text.decode("ascii"))
    except ValueError:
        value = None
    is_list = isinstance(value, list) and all(type(item) is int and 0 <= item < 2**32 for item in value)
    if is_list and b"-" not in text:  # -0 is no token id
        assert token_ids(text).tolist() == value
    else:
        with pytest.raises(ValueError):
            token_ids(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[1, -2]", "expected a whole number from 0 to 4294967295 at byte 4, not '-2]'"),
        (b"[12345678901]", "at byte 1, not '12345678901]'"),
        (b"[1 2]", "expected ']' at byte 3, not '2]'"),
        (b"[\xc3\xa9]", "at byte 1, not ''"),
        (b"[1][2]", "nothing may follow the list at byte 3"),
    ],
)
def test_a_refusal_says_where(text: bytes, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        token_ids(text)
    assert says in str(caught.value)
