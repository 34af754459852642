"""The chunk checksum: its definition, its numbers, and what it notices."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lmkv_kernels
from lmkv_kernels import _host, reference
from tests.kernels.layouts import random_bytes


def definition(data: bytes) -> int:
    """docs/contribute/checksum.md, word for word."""
    total = 0
    for i in range(len(data) // 8):
        w = int.from_bytes(data[8 * i : 8 * i + 8], "little")
        lo, hi = w % 2**32, w >> 32
        k, m = (i + 1) * 0x9E3779B1 % 2**32, (i + 1) * 0x85EBCA77 % 2**32
        total += w + (lo + k) % 2**32 * ((hi + m) % 2**32)
    return total % 2**64


@settings(max_examples=200, deadline=None)
@given(words=st.integers(0, 300), seed=st.integers(0, 2**32 - 1), shift=st.integers(0, 7))
def test_every_way_of_summing_follows_the_definition(words: int, seed: int, shift: int) -> None:
    buffer = random_bytes(seed, 8 * words + 8 * shift + 8)
    chunk = buffer[8 * shift : 8 * shift + 8 * words]
    expected = definition(chunk.tobytes())
    assert reference.checksum(chunk) == expected
    assert lmkv_kernels.checksum(buffer, 8 * shift, 8 * words) == expected
    assert _host.checksum(buffer, 8 * shift, 8 * words, 1, portable=True) == expected


def test_known_numbers_stay_as_they_are() -> None:
    vectors = {
        bytes(8): 0x52C48C46FC4A3B47,
        b"\xff" * 8: 0x52C48C45D826F71F,
        bytes(range(64)): 0x34B80007C694A184,
    }
    for data, expected in vectors.items():
        assert lmkv_kernels.checksum(data) == expected
    assert lmkv_kernels.checksum(b"") == 0


def test_threads_do_not_change_the_sum() -> None:
    data = random_bytes(1, (20 << 20) + 8)
    expected = reference.checksum(data)
    for threads in (1, 2, 3, 5, 0):
        assert lmkv_kernels.checksum(data, threads=threads) == expected


def test_sums_of_any_parts_add_up() -> None:
    data = random_bytes(2, 8000)
    for cut in (0, 8, 128, 4000, 8000):
        parts = reference.checksum(data[:cut]) + reference.checksum(data[cut:], cut // 8)
        assert parts % 2**64 == lmkv_kernels.checksum(data)


def test_a_flipped_bit_swapped_words_and_a_moved_block_are_noticed() -> None:
    data = random_bytes(3, 4096)
    expected = lmkv_kernels.checksum(data)
    for bit in range(0, 8 * data.size, 97):
        data[bit // 8] ^= 1 << bit % 8
        assert lmkv_kernels.checksum(data) != expected
        data[bit // 8] ^= 1 << bit % 8
    words = data.view("<u8")
    swapped = words.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert lmkv_kernels.checksum(swapped) != expected
    assert lmkv_kernels.checksum(np.roll(words, 64)) != expected
    zeros = np.zeros(4096, np.uint8)
    assert lmkv_kernels.checksum(zeros) != lmkv_kernels.checksum(zeros[8:]) != 0


def test_all_kinds_of_memory_can_be_summed() -> None:
    data = bytes(range(256))
    expected = lmkv_kernels.checksum(data)
    with mmap.mmap(-1, 4096) as mapped:
        mapped[:256] = data
        assert lmkv_kernels.checksum(mapped, 0, 256) == expected
        with memoryview(mapped) as view:
            assert lmkv_kernels.checksum(view, 0, 256) == expected
    assert lmkv_kernels.checksum(bytearray(data)) == expected
    assert lmkv_kernels.checksum(np.frombuffer(data, "<u2")) == expected
    with pytest.raises(ValueError, match="not contiguous"):
        lmkv_kernels.checksum(np.frombuffer(data, "<u2")[::2])
    with pytest.raises(ValueError, match="not contiguous"):
        lmkv_kernels.checksum(memoryview(data)[::2])


@pytest.mark.parametrize(
    ("offset", "size_bytes", "words"),
    [
        (-8, 8, "not inside"),
        (0, 72, "not inside"),
        (64, 8, "not inside"),
        (72, None, "not inside"),
        (0, 12, "multiple"),
    ],
)
def test_what_is_not_a_run_of_words_inside_the_buffer_is_refused(
    offset: int, size_bytes: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        lmkv_kernels.checksum(bytes(64), offset, size_bytes)


@settings(max_examples=100, deadline=None)
@given(words=st.integers(0, 300), first_word=st.integers(0, 1 << 20), shift=st.integers(0, 9))
def test_a_summed_copy_copies_and_says_what_its_words_add(words: int, first_word: int, shift: int) -> None:
    source, memory = random_bytes(1, 8 * words), random_bytes(2, 8 * (words + 20))
    expected = memory.copy()
    expected[8 * shift :][: source.size] = source
    total = lmkv_kernels.summed_copy(memory.ctypes.data + 8 * shift, source.ctypes.data, source.size, first_word)
    assert total == reference.checksum(source, first_word)
    assert np.array_equal(memory, expected)
    with pytest.raises(ValueError, match="multiple of 8, not 7"):
        lmkv_kernels.summed_copy(memory.ctypes.data, source.ctypes.data, 7, 0)
