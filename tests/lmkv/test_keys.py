from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.errors import BadChunkKey, BadTokens
from lmkv.keys import (
    EMPTY_DIGEST,
    MAX_KEYS,
    ChunkKey,
    Digest,
    KeyChain,
    PageKeyChain,
    as_tokens,
    chunk_keys,
    digest,
    foreign_key,
    join_keys,
    listed_keys,
    page_keys,
    page_seed,
    partial_keys,
    root_key,
    split_keys,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text(encoding="utf-8"))
FINGERPRINT = bytes(range(16))
ROOT = root_key(FINGERPRINT)
token_ids = st.integers(min_value=0, max_value=2**32 - 2)


def naive_root(case: Mapping[str, Any]) -> bytes:
    """The root by the words of the specification, without any code of lmkv."""
    message = b"lmkv." + GOLDEN["hash_scheme"].encode()
    for part in (bytes.fromhex(case["fingerprint"]), case["cache_salt"].encode(), case["lora"].encode()):
        message += struct.pack("<I", len(part)) + part
    return hmac.new(bytes.fromhex(case["secret"]), message, sha256).digest()[:16]


def naive_keys(case: Mapping[str, Any]) -> list[str]:
    """The chain by the words of the specification, without any code of lmkv."""
    parent, keys = naive_root(case), []
    tokens, size = case["tokens"], case["chunk_size"]
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        if len(chunk) < size and not case["partial"]:
            break
        extras = bytes.fromhex(case["extras"].get(str(start // size), ""))
        mark = b"\xff\xff\xff\xff" if extras else b""
        parent = sha256(parent + struct.pack(f"<{len(chunk)}I", *chunk) + mark + extras).digest()[:16]
        keys.append(parent.hex())
    return keys


@pytest.mark.parametrize("case", GOLDEN["chains"], ids=lambda case: str(case["name"]))
def test_golden_vectors_hold_for_lmkv_and_for_the_specification(case: Mapping[str, Any]) -> None:
    root = root_key(
        bytes.fromhex(case["fingerprint"]),
        cache_salt=case["cache_salt"],
        lora=case["lora"],
        secret=bytes.fromhex(case["secret"]),
    )
    extras = {int(index): bytes.fromhex(extra) for index, extra in case["extras"].items()}
    keys = chunk_keys(as_tokens(case["tokens"]), root, case["chunk_size"], partial=case["partial"], extras=extras)
    assert root.hex() == case["root"] == naive_root(case).hex()
    assert [key.hex() for key in keys] == case["keys"] == naive_keys(case)


@pytest.mark.parametrize("case", GOLDEN["chains"], ids=lambda case: str(case["name"]))
def test_keys_of_partial_chunks_are_those_of_the_chain(case: Mapping[str, Any]) -> None:
    tokens, size = as_tokens(case["tokens"]), case["chunk_size"]
    extras = {int(index): bytes.fromhex(extra) for index, extra in case["extras"].items()}
    chain = KeyChain(root_key(FINGERPRINT), size, extras)
    chain.extend(tokens)
    for number in range(-(-tokens.size // size)):
        parent = chain.keys[number - 1] if number else chain.root
        rest = tokens[number * size : (number + 1) * size]
        lengths = range(1, min(rest.size, size - 1) + 1)
        expected = [(length, chain.partial(tokens[: number * size + length])) for length in lengths]
        assert partial_keys(parent, rest, lengths, extras.get(number, b"")) == expected
        assert partial_keys(parent, rest, lengths[1::2], extras.get(number, b"")) == expected[1::2]


def test_the_key_of_a_foreign_page_is_a_digest_under_the_root() -> None:
    digests = [sha256(bytes([number])).digest() for number in range(4)]
    roots = [root_key(FINGERPRINT), root_key(FINGERPRINT, cache_salt="s"), root_key(FINGERPRINT, secret=b"s")]
    keys = [[foreign_key(root, digest) for digest in digests] for root in roots]
    assert keys[0] == [sha256(b"lmkv.page" + roots[0] + digest).digest()[:16] for digest in digests]
    assert len({key for row in keys for key in row}) == 12


def test_no_two_golden_roots_are_alike_unless_they_should_be() -> None:
    namespaces = {(c["fingerprint"], c["secret"], c["cache_salt"], c["lora"]): c["root"] for c in GOLDEN["chains"]}
    assert len(set(namespaces.values())) == len(namespaces) == 7


def test_a_key_says_everything_before_it() -> None:
    first = chunk_keys(as_tokens([1, 2, 3, 4]), ROOT, 2)
    other = chunk_keys(as_tokens([9, 2, 3, 4]), ROOT, 2)
    assert first[0] != other[0]
    assert first[1] != other[1]  # the same two tokens, after others
    assert chunk_keys(as_tokens([1, 2, 3, 5]), ROOT, 2)[0] == first[0]


@settings(deadline=None)
@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_salt_and_lora_never_run_together(salt: str, lora: str, other_salt: str, other_lora: str) -> None:
    alike = (salt, lora) == (other_salt, other_lora)
    assert (
        root_key(FINGERPRINT, cache_salt=salt, lora=lora)
        == root_key(FINGERPRINT, cache_salt=other_salt, lora=other_lora)
    ) is alike


def test_a_secret_changes_every_key() -> None:
    tokens = as_tokens(range(8))
    open_keys = chunk_keys(tokens, ROOT, 4)
    secret_keys = chunk_keys(tokens, root_key(FINGERPRINT, secret=b"x"), 4)
    assert not set(open_keys) & set(secret_keys)


def test_a_partial_chunk_matches_only_as_a_whole() -> None:
    tokens = as_tokens(range(10))
    keys = chunk_keys(tokens, ROOT, 4, partial=True)
    assert len(keys) == 3
    assert keys[:2] == chunk_keys(tokens, ROOT, 4)
    assert keys[2] not in chunk_keys(as_tokens(range(12)), ROOT, 4, partial=True)
    assert keys[2] not in chunk_keys(as_tokens(range(9)), ROOT, 4, partial=True)


def test_a_prompt_of_whole_chunks_has_no_partial_one() -> None:
    chain = KeyChain(ROOT, 4)
    tokens = as_tokens(range(8))
    chain.extend(tokens)
    assert chain.partial(tokens) is None
    assert len(chunk_keys(tokens, ROOT, 4, partial=True)) == 2


def test_extras_change_their_chunk_and_all_after_it() -> None:
    tokens = as_tokens(range(12))
    plain = chunk_keys(tokens, ROOT, 4)
    with_image = chunk_keys(tokens, ROOT, 4, extras={1: b"image"})
    assert with_image[0] == plain[0]
    assert with_image[1] != plain[1]
    assert with_image[2] != plain[2]


def test_no_tokens_can_imitate_extras() -> None:
    """Extras that look like two more tokens are distinguished by the mark, which is not a token id."""
    looks_alike = chunk_keys(as_tokens([1, 2]), ROOT, 2, extras={0: struct.pack("<2I", 3, 4)})
    assert looks_alike != chunk_keys(as_tokens([1, 2, 3, 4]), ROOT, 4)
    with pytest.raises(BadTokens):
        as_tokens([1, 2, 0xFFFF_FFFF])


@settings(deadline=None)
@given(st.lists(token_ids, max_size=64), st.integers(1, 9))
def test_a_list_and_arrays_of_any_width_have_the_same_keys(tokens: list[int], chunk_size: int) -> None:
    keys = chunk_keys(as_tokens(tokens), ROOT, chunk_size, partial=True)
    for dtype in ("<u4", ">u4", "<i8"):
        assert chunk_keys(as_tokens(np.array(tokens, dtype=dtype)), ROOT, chunk_size, partial=True) == keys
    assert (
        chunk_keys(as_tokens(np.array([tokens, tokens], dtype="<u4").T[:, 0]), ROOT, chunk_size, partial=True) == keys
    )


@settings(deadline=None)
@given(st.data())
def test_a_prompt_that_grows_gets_the_keys_of_the_whole(data: st.DataObject) -> None:
    tokens = as_tokens(data.draw(st.lists(token_ids, max_size=80)))
    chunk_size = data.draw(st.integers(1, 9))
    extras = data.draw(st.dictionaries(st.integers(0, 8), st.binary(max_size=6), max_size=3))
    chain = KeyChain(ROOT, chunk_size, extras)
    for stop in sorted(data.draw(st.lists(st.integers(0, tokens.size), max_size=6))):
        chain.extend(tokens[:stop])
        assert len(chain.keys) == stop // chunk_size
    chain.extend(tokens)
    assert chain.keys == chunk_keys(tokens, ROOT, chunk_size, extras=extras)
    last = chain.partial(tokens)
    assert [*chain.keys, *([] if last is None else [last])] == chunk_keys(
        tokens, ROOT, chunk_size, partial=True, extras=extras
    )


@pytest.mark.parametrize("tokens", [[-1], [2**32], [2**32 - 1], ["word"], [None], [[1, 2]], [[1], [2, 3]]])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(BadTokens):
        as_tokens(tokens)


@pytest.mark.parametrize("tokens", [[-2], [2**32 + 5], [1.5]])
def test_an_array_is_refused_like_a_list(tokens: Any) -> None:
    with pytest.raises(BadTokens):
        as_tokens(np.array(tokens))


@pytest.mark.parametrize("vocab_size", [0, 100])
def test_negative_tokens_of_a_message_are_named(vocab_size: int) -> None:
    """They are 32 bits wide, and not copied."""
    with pytest.raises(BadTokens, match="token id -3 is negative"):
        as_tokens(np.array([5, -3, 7], np.int32), vocab_size)
    for tokens in (np.array([5, 99], np.int32), np.array([5, 0, 99], np.int32)[::2]):
        found = as_tokens(tokens, vocab_size)
        assert (found.dtype, found.tolist()) == (np.dtype("<u4"), [5, 99])


def test_a_token_beyond_the_vocabulary_is_named() -> None:
    with pytest.raises(BadTokens, match="token id 100 is beyond the vocabulary of 100") as raised:
        as_tokens([1, 100], vocab_size=100)
    assert raised.value.metadata == {"token": "100", "vocab_size": "100"}
    assert as_tokens([99], vocab_size=100).tolist() == [99]


def test_keys_travel_as_one_field() -> None:
    keys = chunk_keys(as_tokens(range(12)), ROOT, 4)
    assert split_keys(join_keys(keys)) == keys
    assert split_keys(b"") == []


def test_half_a_key_is_refused() -> None:
    with pytest.raises(BadChunkKey, match="chunk_keys has 17 bytes") as raised:
        split_keys(bytes(17))
    assert raised.value.metadata == {"field": "chunk_keys", "size_bytes": "17"}


def test_too_many_keys_are_refused() -> None:
    assert len(split_keys(bytes(16 * MAX_KEYS))) == MAX_KEYS
    with pytest.raises(BadChunkKey, match="at most 65536"):
        split_keys(bytes(16 * (MAX_KEYS + 1)))
    with pytest.raises(BadChunkKey, match="evicted_keys has 2 keys; at most 1"):
        split_keys(bytes(32), field="evicted_keys", limit=1)


def test_each_key_of_a_list_has_its_own_length_checked() -> None:
    assert listed_keys([bytes(16), b"k" * 16]) == [bytes(16), b"k" * 16]
    assert listed_keys([]) == []
    for keys in ([bytes(15)], [bytes(8), bytes(8)], [bytes(15), bytes(17)], [b""]):
        with pytest.raises(BadChunkKey, match="chunk_keys has a key of"):
            listed_keys(keys)
    with pytest.raises(BadChunkKey, match="damaged_keys has 2 keys; at most 1 "):
        listed_keys([bytes(16)] * 2, field="damaged_keys", limit=1)


@pytest.mark.parametrize("case", GOLDEN["pages"], ids=lambda case: str(case["name"]))
def test_golden_vectors_of_pages_hold_for_lmkv_and_for_the_specification(case: Mapping[str, Any]) -> None:
    root = root_key(bytes.fromhex(case["fingerprint"]), secret=bytes.fromhex(case["secret"]))
    tokens, size = case["tokens"], case["page_size"]
    salt = case["cache_salt"].encode()
    digest = b""
    if salt:
        digest = sha256(b"sglang-cache-namespace-v1\0\1" + struct.pack("<Q", len(salt)) + salt).digest()
    assert page_seed(case["cache_salt"]) == digest
    digests = []
    for start in range(0, len(tokens) - size + 1, size):
        digest = sha256(digest + struct.pack(f"<{size}I", *tokens[start : start + size])).digest()
        digests.append(digest)
    assert [one.hex() for one in digests] == case["digests"]
    keys = [ChunkKey(sha256(b"lmkv.page" + root + one).digest()[:16]) for one in digests]
    assert [key.hex() for key in keys] == case["keys"]
    assert [foreign_key(root, one) for one in digests] == keys
    assert page_keys(as_tokens(tokens), root, size, page_seed(case["cache_salt"])) == (join_keys(keys), digest)


@given(st.lists(token_ids, max_size=40), st.integers(1, 5), st.integers(0, 8))
def test_keys_of_pages_are_the_same_in_slices(tokens: list[int], page_size: int, page_count: int) -> None:
    whole = as_tokens(tokens)
    split = page_count * page_size
    first, prior = page_keys(whole[:split], ROOT, page_size)
    rest, last = page_keys(whole[split:], ROOT, page_size, prior) if split < whole.size else (b"", prior)
    assert (first + rest, last) == page_keys(whole, ROOT, page_size)


@given(st.lists(token_ids, max_size=40), st.integers(1, 5), st.integers(0, 40), st.sampled_from(["", "tenant-a"]))
def test_a_chain_of_pages_grows_to_the_keys_of_the_pages(tokens: list[int], size: int, split: int, salt: str) -> None:
    whole = as_tokens(tokens)
    chain = PageKeyChain(ROOT, size, seed=page_seed(salt))
    chain.extend(whole[:split])
    chain.extend(whole)
    expected, _ = page_keys(whole, ROOT, size, page_seed(salt))
    assert join_keys(chain.keys) == expected
    assert chain.partial(whole) is None
    other = chain.beginning()
    other.extend(whole)
    assert other.keys == chain.keys


def test_inputs_besides_tokens_change_the_keys_of_their_page_and_of_those_behind_it() -> None:
    tokens = as_tokens(range(12))
    plain, with_image = PageKeyChain(ROOT, 4), PageKeyChain(ROOT, 4, {1: b"image"})
    for chain in (plain, with_image):
        chain.extend(tokens)
    assert plain.keys[0] == with_image.keys[0]
    assert not set(plain.keys[1:]) & set(with_image.keys[1:])
    with pytest.raises(BadTokens, match="page 3 with 1 of 4 tokens has no key"):
        plain.behind(3, tokens[:1])


def test_a_digest_is_the_number_of_keys_and_the_sum_of_their_first_halves() -> None:
    keys = [ChunkKey(number.to_bytes(8, "little") + b"\xff" * 8) for number in (1, 2, (1 << 64) - 1)]
    assert digest([]) == EMPTY_DIGEST == Digest(chunk_count=0, key_sum=0)
    assert digest(keys[:2]) == Digest(chunk_count=2, key_sum=3)
    assert digest(keys) == Digest(chunk_count=3, key_sum=2), "sums are modulo 2^64"
    assert digest(keys[:1]).plus(digest(keys[1:])) == digest(keys)
    assert digest(keys).plus(EMPTY_DIGEST) == digest(keys)
