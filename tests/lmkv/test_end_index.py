"""The index of ends against a search of all chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmkv.end_index import EndIndex
from lmkv.keys import ChunkKey, as_tokens, partial_keys, prefix_digests

PARENTS = [ChunkKey(bytes([number]) * 16) for number in range(2)]
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def digests(parent: bytes, tokens: list[int]) -> bytes:
    return prefix_digests(ChunkKey(parent), as_tokens(tokens))


def common(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(other)))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(PARENTS), few_tokens), max_size=40),
    st.sampled_from(PARENTS),
    few_tokens,
)
def test_the_chunks_that_begin_alike_are_those_of_a_search_of_all(
    story: list[tuple[bool, int, ChunkKey, list[int]]], parent: ChunkKey, asked: list[int]
) -> None:
    index, held = EndIndex[bytes](), dict[bytes, tuple[ChunkKey, list[int]]]()
    for is_stored, number, of, tokens in story:
        key = bytes([number])
        if is_stored:
            index.add(key, of, len(tokens), digests(of, tokens))
            held[key] = of, tokens
        else:
            index.remove(key)
            held.pop(key, None)
    index.check()
    expected = {key: common(tokens, asked) for key, (of, tokens) in held.items() if of == parent}
    found = list(index.beginning_as(parent, digests(parent, asked)))
    assert {key: count for count, key in found} == {key: count for key, count in expected.items() if count}
    counts = [count for count, _ in found]
    assert counts == sorted(counts, reverse=True)
    assert index.has_digests(parent) is any(of == parent for of, _ in held.values())


def test_the_digests_of_prefixes_begin_their_keys() -> None:
    tokens = as_tokens([5, 6, 7])
    for extras in (b"", b"an image"):
        keys = partial_keys(PARENTS[0], tokens, [1, 2, 3], extras)
        assert prefix_digests(PARENTS[0], tokens, extras) == b"".join(key[:8] for _, key in keys)
    assert prefix_digests(PARENTS[0], tokens) != prefix_digests(PARENTS[1], tokens)
