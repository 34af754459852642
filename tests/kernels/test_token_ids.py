"""Token ids out of JSON: what `json` reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv_kernels import token_ids

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
