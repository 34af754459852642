"""Token ids, chunk keys, and the small texts that name tiers, positions, pages and callers."""

from __future__ import annotations

import json

import numpy as np

from lmkv import tiers
from lmkv.auth.credentials import token_in
from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import BadChunkKey, BadPageToken, BadRequest, BadTokens
from lmkv.keys import KEY_BYTES, ChunkKey, KeyChain, as_tokens, digest, join_keys, part_key, root_key, split_keys
from lmkv.keys import chunk_keys as reference_keys
from lmkv.rpc.requests import page_token, read_page_token
from lmkv.safe_text import safe_text
from lmkv.units import parse_gib, parse_seconds
from lmkv_kernels import chunk_keys, token_ids
from lmkv_server.coordinator.http.bodies import lift_tokens
from tests.fuzz.inputs import Input, frame
from tests.fuzz.promises import refused_as

COVERS = (
    "lmkv.keys",
    "lmkv.packing",
    "lmkv.tiers",
    "lmkv.units",
    "lmkv.safe_text",
    "lmkv.auth.credentials",
    "lmkv.config.remote_url",
    "lmkv.rpc.requests",
    "lmkv_server.coordinator.http.bodies",
)
SEEDS = [
    b"\x00[1, 2, 3, 4294967295]",
    b"\x00[12, 345,6789, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27]",
    b'\x01{"tokens": [1, 2], "model_name": "m"}',
    b"\x02" + bytes(range(64)),
    b"\x03\x04" + np.arange(20, dtype="<u4").tobytes(),
    b"\x04worker-1/disk",
    b"\x05" + page_token("ListPins", "pin-1").encode(),
    b"\x06Bearer secret",
    b"\x06Basic OnNlY3JldA==",
    b"\x06Basic \xad",  # a header that is not ASCII
    b"\x07redis://:password@host:6379/1",
    b"\x07s3://bucket.s3.eu-west-1.amazonaws.com/prefix",
    b"\x081.5 GiB",
    b"\x08500ms",
    "\x09text\u202e\n".encode(),
    b"\x0a" + frame(b"fingerprint") + frame(b"salt") + b"lora",
]


def run(data: bytes) -> None:
    """The first byte selects the function."""
    source = Input(data)
    _CHECKS[source.byte() % len(_CHECKS)](source)


def _token_ids(source: Input) -> None:
    text = source.rest()
    try:
        expected = json.loads(text)
    except (ValueError, RecursionError):
        expected = None
    is_valid = isinstance(expected, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in expected)
    try:
        found = token_ids(memoryview(text))
    except ValueError as error:
        assert not is_valid or _is_other_json(text), error
        assert len(str(error)) < 256
    else:
        assert is_valid
        assert found.tolist() == expected
    if isinstance(expected, list):
        with refused_as(BadTokens):
            assert as_tokens(expected, 1000).tolist() == [int(one) for one in expected]


def _is_other_json(text: bytes) -> bool:
    """Python reads what the format does not have: other encodings, a byte-order mark, -0."""
    return not text.isascii() or b"\0" in text or b"-0" in text


def _lift(source: Input) -> None:
    body = source.rest()
    rest, tokens = lift_tokens(body)
    assert len(rest) <= len(body) + 16
    assert tokens is None or bytes(tokens) in body


def _keys(source: Input) -> None:
    packed = source.rest()
    with refused_as(BadChunkKey):
        keys = split_keys(packed, limit=100)
        assert join_keys(keys) == packed
        assert all(len(key) == KEY_BYTES for key in keys)
        half = len(keys) // 2
        assert digest(keys[:half]).plus(digest(keys[half:])) == digest(keys)
        assert all(len(part_key(key, 1)) == KEY_BYTES for key in keys)


def _chain(source: Input) -> None:
    chunk_size = source.byte() % 32 + 1
    words = source.rest()[: 4 * 512]
    tokens = np.frombuffer(words[: len(words) // 4 * 4], "<u4")
    root = root_key(b"f")
    expected = reference_keys(tokens, root, chunk_size, partial=True)
    assert join_keys(expected) == chunk_keys(tokens, root, chunk_size)
    grown = KeyChain(root, chunk_size)
    for stop in range(0, tokens.size, 7):
        grown.extend(tokens[:stop])
    grown.extend(tokens)
    assert grown.keys == expected[: tokens.size // chunk_size]


def _position(source: Input) -> None:
    text = source.rest().decode(errors="replace")
    with refused_as(BadRequest):
        position = tiers.parse_position(text)
        assert tiers.parse_position(tiers.format_position(position)) == position


def _page(source: Input) -> None:
    text = source.rest().decode(errors="replace")
    with refused_as(BadPageToken):
        last = read_page_token("ListPins", text)
        assert read_page_token("ListPins", page_token("ListPins", last)) == last
    assert read_page_token("ListPins", page_token("ListPins", text)) == text


def _caller(source: Input) -> None:
    header = source.rest().decode("latin-1")
    assert len(token_in(header)) <= len(header)


def _url(source: Input) -> None:
    with refused_as(ValueError):
        parsed = parse_remote_url(source.rest().decode(errors="replace"))
        assert bool(parsed.host) != bool(parsed.bucket)
        assert 0 <= parsed.port < 65_536
        assert "@" not in parsed.shown.partition("://")[2].partition("/")[0], "a password may be shown"


def _measure(source: Input) -> None:
    text = source.rest().decode(errors="replace")
    for parse in (parse_gib, parse_seconds):
        with refused_as(ValueError):
            assert 0 <= parse(text) < float("inf")


def _text(source: Input) -> None:
    limit = source.byte() + 1
    shown = safe_text(source.rest().decode(errors="replace"), limit)
    assert shown.isprintable()
    assert len(shown) <= limit + 40


def _root(source: Input) -> None:
    fingerprint, salt, lora = source.frame(), source.frame().decode("latin-1"), source.rest().decode("latin-1")
    key = root_key(fingerprint, cache_salt=salt, lora=lora, secret=b"s")
    assert len(key) == KEY_BYTES
    assert key != root_key(fingerprint, cache_salt=salt + lora[:1], lora=lora[1:], secret=b"s") or not lora
    assert isinstance(ChunkKey(key), bytes)


_CHECKS = (_token_ids, _lift, _keys, _chain, _position, _page, _caller, _url, _measure, _text, _root)
