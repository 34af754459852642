"""Requests are messages that can be decoded; page tokens go round, and nothing else passes for one."""

from __future__ import annotations

import base64

import pytest

from lmkv.errors import BadMessage, BadPageToken
from lmkv.rpc.requests import (
    DEFAULT_PAGE_SIZE,
    MAX_PAGE_SIZE,
    checked,
    page_limit,
    page_token,
    read_page_token,
)
from lmkv.v1.cache_service_pb2 import LookupRequest


@pytest.mark.parametrize("last", ["a", "lmkv-1", "größe", ""])
def test_a_token_says_where_the_page_ended(last: str) -> None:
    assert read_page_token("ListInstances", page_token("ListInstances", last)) == last


def test_no_token_is_the_first_page() -> None:
    assert read_page_token("ListInstances", "") == ""


@pytest.mark.parametrize(
    "token", ["x", "not base64!", "größe", "YWJj", base64.urlsafe_b64encode(b"12345678lmkv-1").decode(), "\0"]
)
def test_what_was_not_made_here_is_refused(token: str) -> None:
    with pytest.raises(BadPageToken):
        read_page_token("ListInstances", token)


def test_a_token_of_another_call_is_refused() -> None:
    with pytest.raises(BadPageToken):
        read_page_token("ListInstances", page_token("ListPins", "a"))


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05abc", bytes(3)])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage, match="not a valid protobuf message"):
        checked(data, LookupRequest.FromString)


def test_page_sizes_are_bounded() -> None:
    assert [page_limit(size) for size in (-1, 0)] == [DEFAULT_PAGE_SIZE, DEFAULT_PAGE_SIZE]
    largest = MAX_PAGE_SIZE
    assert [page_limit(size) for size in (1, largest, largest + 1, 5 * largest)] == [1, largest, largest, largest]
