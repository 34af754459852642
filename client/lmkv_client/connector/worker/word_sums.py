"""The share of one rank in the checksum of a chunk (docs/contribute/checksum.md), computed by torch on any device."""

from __future__ import annotations

import torch

HALF = 0xFFFF_FFFF
LOW_FACTOR, HIGH_FACTOR = 0x9E37_79B1, 0x85EB_CA77
SLICE_WORDS = 1 << 20
"""Words summed at a time; each temporarily takes about 64 bytes of device memory."""


def word_sums(words: torch.Tensor, first_words: torch.Tensor) -> int:
    """The sum over `words`, `[runs, words of a run]` of int64, modulo 2^64.

    `first_words`, `[runs]` on the same device, has the index in the chunk of each run's first word.
    """
    run_count, run_words = words.shape
    rows = max(1, SLICE_WORDS // run_words)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for row in range(0, run_count, rows):
        for start in range(0, run_words, SLICE_WORDS):
            part = words[row : row + rows, start : start + SLICE_WORDS]
            inside = torch.arange(start + 1, start + 1 + part.shape[1], device=words.device)
            total += _sum(part, first_words[row : row + rows, None] + inside)
    return int(total) % 2**64


def _sum(words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The sum of some words by their positions, counted from 1. Integers wrap around, on every device."""
    positions = positions & HALF
    low = (words + positions * LOW_FACTOR) & HALF  # only the low half of anything counts
    high = ((words >> 32) + positions * HIGH_FACTOR) & HALF
    return (words + low * high).sum()
