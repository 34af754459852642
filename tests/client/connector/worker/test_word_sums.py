"""Checksums in torch's terms against the kernels': the same for any words, however they are cut into runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv_client.connector.worker import word_sums as module
from lmkv_client.connector.worker.word_sums import word_sums
from lmkv_kernels import checksum
from lmkv_kernels.reference import checksum as plain_checksum

VECTORS = {
    bytes(8): 0x52C48C46FC4A3B47,
    b"\xff" * 8: 0x52C48C45D826F71F,
    bytes(range(64)): 0x34B80007C694A184,
}


@pytest.mark.parametrize("content", VECTORS)
def test_the_vectors_of_the_documentation(content: bytes) -> None:
    words = torch.frombuffer(bytearray(content), dtype=torch.int64)
    assert word_sums(words[None], torch.zeros(1, dtype=torch.int64)) == VECTORS[content]


@settings(deadline=None)
@given(
    run_count=st.integers(1, 5),
    run_words=st.integers(1, 40),
    slice_words=st.sampled_from([1, 7, 64, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_runs_add_up_to_the_chunk(run_count: int, run_words: int, slice_words: int, seed: int) -> None:
    chunk = np.random.default_rng(seed).integers(0, 256, 8 * run_count * run_words, np.uint8)
    words = torch.from_numpy(chunk).view(torch.int64).view(run_count, run_words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_WORDS", slice_words)
        assert word_sums(words, torch.arange(run_count) * run_words) == checksum(chunk)


@pytest.mark.parametrize("first_word", [0, 1000, 2**32 - 3, 2**33 + 5])
def test_a_run_counts_by_where_it_is_in_the_chunk(first_word: int) -> None:
    run = np.random.default_rng(1).integers(0, 256, 128, np.uint8)
    words = torch.from_numpy(run).view(torch.int64)[None]
    assert word_sums(words, torch.tensor([first_word])) == plain_checksum(run, first_word)
