"""Copies between an engine's pages and extents: pages of all kinds make the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from lmkv_client.engine import Copier, Written
from lmkv_kernels import Pages, checksum, separate_rows, token_rows
from tests.client.engine.engines import SPEC, Attach, prompt, words
from tests.waiting import WAIT_SECONDS

LAYERS, HEADS, SIZE, CHUNK = SPEC.layer_count, SPEC.kv_head_count, SPEC.head_size, SPEC.chunk_size
BLOCK, BLOCKS = 8, 24
PER_CHUNK = CHUNK // BLOCK


def random_kv() -> torch.Tensor:
    """Keys and values as `[layer][key, value][head][token][element]`."""
    return torch.randn(LAYERS, 2, HEADS, BLOCK * BLOCKS, SIZE)


def paged(kv: torch.Tensor, part: int, layer: int) -> torch.Tensor:
    """`[blocks, heads, block size, head size]` of a layer, in memory of its own that has tokens outermost."""
    return kv[layer, part].transpose(0, 1).contiguous().view(BLOCKS, BLOCK, HEADS, SIZE).transpose(1, 2)


def side_by_side(kv: torch.Tensor) -> tuple[list[Pages], list[torch.Tensor]]:
    tensors = [torch.cat([paged(kv, 0, layer), paged(kv, 1, layer)], dim=3) for layer in range(LAYERS)]
    return [token_rows(tensors, 0, HEADS)], tensors


def separate(kv: torch.Tensor) -> tuple[list[Pages], list[torch.Tensor]]:
    """Values before keys in memory: no single distance leads from one to the other."""
    values = [paged(kv, 1, layer) for layer in range(LAYERS)]
    keys = [paged(kv, 0, layer) for layer in reversed(range(LAYERS))][::-1]
    if keys[0].data_ptr() - values[0].data_ptr() == keys[1].data_ptr() - values[1].data_ptr():
        keys[1] = paged(kv, 0, 1)
    return separate_rows(keys, values), [*keys, *values]


def in_one_buffer(kv: torch.Tensor) -> tuple[list[Pages], list[torch.Tensor]]:
    """All keys before all values, as SGLang's pools have them."""
    buffer = torch.stack(
        [torch.stack([kv[layer, part].transpose(0, 1) for layer in range(LAYERS)]) for part in range(2)]
    )
    tensors = [
        [buffer[part, layer].view(BLOCKS, BLOCK, HEADS, SIZE).transpose(1, 2) for layer in range(LAYERS)]
        for part in range(2)
    ]
    pages = separate_rows(tensors[0], tensors[1])
    assert len(pages) == 1
    return pages, [buffer]


KINDS = [side_by_side, separate, in_one_buffer]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_chunks_have_the_same_bytes_whatever_the_pages_are(attach: Attach, kind: object, other: object) -> None:
    engine = attach()
    kv = random_kv()
    pages, kept = kind(kv)  # type: ignore[operator]
    blocks = [[(3 * index + 5 * chunk) % BLOCKS for index in range(PER_CHUNK)] for chunk in range(3)]
    keys = engine.keys(prompt(3))
    extents = engine.reserve(3, timeout=WAIT_SECONDS)
    checksums = engine.register(pages).gather(extents, blocks)
    assert checksums == [checksum(extent.view) for extent in extents]
    for extent, block_ids in zip(extents, blocks, strict=True):
        expected = torch.cat([kv[:, :, :, block * BLOCK : (block + 1) * BLOCK] for block in block_ids], dim=3)
        assert np.array_equal(words(extent), expected.transpose(1, 2).contiguous().numpy().view(np.uint64).ravel())
    engine.commit(Written.chain(keys, extents, checksums=checksums))
    empty, target = other(torch.zeros_like(kv))  # type: ignore[operator]
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        engine.register(empty).scatter(list(held.load()), blocks)
    again = engine.reserve(3, timeout=WAIT_SECONDS)
    assert engine.register(empty).gather(again, blocks) == checksums
    del kept, target


def test_one_block_may_hold_a_whole_sequence(attach: Attach) -> None:
    """As the caches of transformers do: `[1, heads, tokens, head size]`."""
    engine = attach()
    tokens = 3 * CHUNK + 5
    keys = [torch.randn(1, HEADS, tokens, SIZE) for _ in range(LAYERS)]
    values = [torch.randn(1, HEADS, tokens, SIZE) for _ in range(LAYERS)]
    extents = engine.reserve(4, timeout=WAIT_SECONDS)
    slots, counts = [chunk * CHUNK for chunk in range(4)], [CHUNK, CHUNK, CHUNK, 5]
    copier = engine.register(separate_rows(keys, values))
    checksums = copier.gather(extents, [[0]] * 4, token_counts=counts, first_slots=slots)
    chunk_keys = engine.keys([index % 1000 for index in range(tokens)], partial=True)
    chunks = Written.chain(chunk_keys[:3], extents[:3], checksums=checksums[:3])
    engine.commit(
        [
            *chunks,
            Written(key=chunk_keys[3], extent=extents[3], token_count=5, parent=chunk_keys[2], checksum=checksums[3]),
        ]
    )
    got_keys, got_values = ([torch.zeros_like(one) for one in side] for side in (keys, values))
    with engine.lookup(chunk_keys, timeout=WAIT_SECONDS) as held:
        engine.register(separate_rows(got_keys, got_values)).scatter(list(held.load()), [[0]] * 4, first_slots=slots)
    assert all(map(torch.equal, [*got_keys, *got_values], [*keys, *values]))


def test_pages_that_are_not_the_specs_are_refused(attach: Attach) -> None:
    engine = attach()
    pages, kept = side_by_side(random_kv())
    separate_pages, also_kept = separate(random_kv())
    cases: Sequence[tuple[Sequence[Pages], str]] = [
        ([], "empty"),
        ([replace(pages[0], layer_addresses=pages[0].layer_addresses[:1])], "bytes"),
        ([replace(pages[0], device="cuda:0")], "host memory"),
        (separate_pages[1:], "bytes of each chunk"),
        ([*pages, *pages], "bytes of each chunk"),
    ]
    for wrong, why in cases:
        with pytest.raises(ValueError, match=why):
            engine.register(wrong)
    assert isinstance(engine.register(pages[0]), Copier)
    del kept, also_kept


def test_copies_that_do_not_fit_are_refused(attach: Attach) -> None:
    engine = attach()
    pages, kept = side_by_side(random_kv())
    copier = engine.register(pages)
    extents = engine.reserve(1, timeout=WAIT_SECONDS)
    for blocks in ([[0]], [[0, 1, 2, BLOCKS]], [[0, 1, 2, 3]] * 2):
        with pytest.raises(ValueError):
            copier.gather(extents, blocks)
    assert copier.gather([], []) == []
    del kept
