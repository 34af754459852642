"""Differences between two computations of a chunk: the native code says what NumPy says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmkv_kernels import _host
from lmkv_kernels.differences import NO_TABLE, NUMBER_BYTES, NUMBERS, differences

Floats = NDArray[np.float32]
Raw = NDArray[np.uint8]

TABLE = np.random.default_rng(5).standard_normal(256).astype(np.float32)
TABLE[[7, 200]] = (np.nan, np.inf)
WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def values(number: str, raw: Raw) -> Floats:
    """The numbers of elements."""
    if number == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if number == "bytes":
        return TABLE[raw]
    return raw.view(np.float16 if number == "float16" else np.float32).astype(np.float32)


def reference(fresh: Floats, held: Floats) -> tuple[float, float]:
    """The errors, as `difference.h` defines them."""
    is_number = np.isfinite(fresh)
    if not np.array_equal(is_number, np.isfinite(held)):
        return math.inf, math.inf
    fresh, held = np.where(is_number, fresh, 0), np.where(is_number, held, 0)
    with np.errstate(over="ignore"):
        squares, apart = np.square(fresh).sum(dtype=np.float64), np.square(fresh - held).sum(dtype=np.float64)
    if max(squares, apart) > np.finfo(np.float32).max:
        return math.inf, math.inf
    size = max(math.sqrt(squares / fresh.size), float(np.finfo(np.float32).tiny))
    shares = np.abs(fresh - held) / (np.minimum(np.abs(fresh), np.abs(held)) + np.float32(size))
    return math.sqrt(apart / fresh.size) / size, float(shares.max())


def measured(number: str, fresh: Raw, held: Raw, *, portable: bool) -> tuple[float, float]:
    """The errors of one layer, by one of the instruction sets."""
    pool, found = np.concatenate([fresh, held]), np.empty(2)
    size = fresh.size
    index, count = NUMBERS.index(number), size // NUMBER_BYTES[number]
    _host.differences(index, TABLE, pool, 0, size, size, count, found, portable)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("number", NUMBERS)
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 5000),
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 100.0, 1e15]),
    noise=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 2.0]),
    kind=st.sampled_from(["rounding", "one bit", "any bits", "not finite in both", "equal"]),
)
@example(seed=1, count=33, scale=1.0, noise=0.0, kind="one bit")
def test_errors_are_those_of_numpy(
    number: str, portable: bool, seed: int, count: int, scale: float, noise: float, kind: str
) -> None:
    choose = np.random.default_rng(seed)
    width = WIDTHS[NUMBER_BYTES[number]]
    if number == "bytes":
        fresh = choose.integers(8, 200, count).astype(np.uint8)
        held = np.clip(fresh + choose.integers(-1, 2, count) * (noise > 0), 8, 199).astype(np.uint8)
    else:
        exact = choose.standard_normal(count).astype(np.float32) * np.float32(scale)
        fresh, held = (rounded(number, one) for one in (exact, exact * (1 + np.float32(noise) * exact.clip(-1, 1))))
    if kind == "any bits":
        fresh = choose.integers(0, 256, fresh.size).astype(np.uint8)
    elif kind == "one bit":
        held.view(width)[choose.integers(count)] ^= width(1 << int(choose.integers(8 * NUMBER_BYTES[number])))
    elif kind == "equal":
        held = fresh.copy()
    elif kind == "not finite in both":
        special = {"bfloat16": 0x7FC0, "float16": 0x7C00, "float32": 0x7F800000, "bytes": 200}[number]
        for one in (fresh, held):
            one.view(width)[:: max(1, count // 3)] = special
    with np.errstate(all="ignore"):
        expected = reference(values(number, fresh), values(number, held))
    found = measured(number, fresh, held, portable=portable)
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-30)
    assert (found == (0, 0)) == (expected == (0, 0))


def rounded(number: str, exact: Floats) -> Raw:
    """Numbers as elements of a type."""
    with np.errstate(over="ignore"):
        if number == "bfloat16":
            return (exact.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).copy()
        return exact.astype(np.float16 if number == "float16" else np.float32).view(np.uint8).copy()


def test_each_layer_is_measured_alone_and_only_its_first_bytes() -> None:
    pool = np.zeros((2, 3, 8), np.float32)  # extent, layer, element
    pool[..., :5] = 1
    pool[1, 1, 2] = 3
    pool[1, 2, 6] = 9  # behind what is compared
    found = differences("float32", pool.reshape(-1).view(np.uint8), (0, 96), (3, 32, 20))
    assert found[:, 0].tolist() == [0, pytest.approx(math.sqrt(4 / 5)), 0]
    assert found[:, 1].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("offsets", "layers"),
    [
        ((0, 64), (3, 32, 20)),
        ((-4, 0), (1, 32, 20)),
        ((0, 32), (0, 32, 20)),
        ((0, 32), (1, 16, 20)),
        ((2, 32), (1, 32, 20)),
    ],
)
def test_what_is_not_inside_the_pool_is_refused(offsets: tuple[int, int], layers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"layers|multiples"):
        differences("float32", np.zeros(128, np.uint8), offsets, layers, NO_TABLE)
