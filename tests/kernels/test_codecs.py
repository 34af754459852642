"""Codecs of chunks: bounds of errors for each code and element type, and the same bits on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmkv_kernels import _host, codecs
from lmkv_kernels.codecs import CODES, ELEMENTS, CodecFormat

TINY = 2.0**-100
"""Groups of smaller magnitudes are encoded as zeros."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}
"""Relative error of one rounding to the element type, with some room for the arithmetic before it."""


def random_elements(element: str, count: int, seed: int, exponent: int) -> torch.Tensor:
    """Elements of all magnitudes around 2^exponent, some of them zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.exp2(torch.randint(-9, 9, (count,), generator=generator))
    values[torch.rand(count, generator=generator) < 0.1] = 0
    return (values * 2.0**exponent).to(getattr(torch, element))


def bytes_of(elements: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = elements.view(torch.uint8).numpy()
    return found


def bounds(kind: CodecFormat, group: torch.Tensor) -> torch.Tensor:
    """Largest errors of a group's elements, by docs/guides/codecs.md."""
    most = group.abs().max()
    if kind.code == "fp8":
        error = torch.maximum(group.abs() * 2.0**-4, most / 448 * 2.0**-10)
    elif kind.code == "int8":
        error = most / 254
    else:
        error = (group.max() - group.min()) / 30
    smallest = 2.0**-24 if kind.element == "float16" else 0.0
    return error * (1 + 2.0**-10) + (group.abs() + error) * ROUNDING[kind.element] + TINY + smallest


def groups(kind: CodecFormat, values: torch.Tensor) -> list[torch.Tensor]:
    planes = torch.split(values, kind.plane_elements)
    return [group for plane in planes for group in torch.split(plane, kind.group_elements)]


def round_trip(kind: CodecFormat, elements: torch.Tensor) -> torch.Tensor:
    raw = bytes_of(elements)
    encoded = np.zeros(kind.encoded_bytes(raw.size), np.uint8)
    assert kind.encode(raw, encoded)
    decoded = torch.empty_like(elements)
    kind.decode(encoded, bytes_of(decoded))
    return decoded


@settings(max_examples=150, deadline=None)
@given(
    element=st.sampled_from(ELEMENTS),
    code=st.sampled_from(CODES),
    plane=st.integers(1, 700),
    group=st.integers(1, 300),
    count=st.integers(1, 2000),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-20, 4),
)
def test_errors_stay_within_the_bound_of_each_group(
    element: str, code: str, plane: int, group: int, count: int, seed: int, exponent: int
) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=plane, group_elements=group)
    elements = random_elements(element, count, seed, exponent)
    decoded = round_trip(kind, elements)
    for before, after in zip(groups(kind, elements.double()), groups(kind, decoded.double()), strict=True):
        assert ((before - after).abs() <= bounds(kind, before)).all()


@settings(max_examples=60, deadline=None)
@given(
    element=st.sampled_from(ELEMENTS),
    code=st.sampled_from(["fp8", "int8"]),
    count=st.integers(1, 500),
    seed=st.integers(0, 2**31),
)
def test_a_second_round_trip_changes_nothing(element: str, code: str, count: int, seed: int) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=96, group_elements=32)
    once = round_trip(kind, random_elements(element, count, seed, 0))
    assert torch.equal(round_trip(kind, once), once)


@settings(max_examples=60, deadline=None)
@given(
    element=st.sampled_from(ELEMENTS),
    code=st.sampled_from(CODES),
    group=st.integers(1, 300),
    count=st.integers(1, 2000),
    seed=st.integers(0, 2**31),
)
def test_every_instruction_set_has_the_same_bits(element: str, code: str, group: int, count: int, seed: int) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=2 * group, group_elements=group)
    elements = random_elements(element, count, seed, 0)
    raw = bytes_of(elements)
    encoded = np.zeros((2, kind.encoded_bytes(raw.size)), np.uint8)
    decoded = np.zeros((2, raw.size), np.uint8)
    for portable in (False, True):
        assert _host.encode(*kind._native, raw, encoded[int(portable)], portable)
        _host.decode(*kind._native, encoded[int(portable)], decoded[int(portable)], portable)
    assert (encoded[0] == encoded[1]).all()
    assert (decoded[0] == decoded[1]).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("code", CODES)
def test_any_bytes_are_decoded_without_a_crash(element: str, code: str) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=96, group_elements=32)
    chunk = np.zeros(4000, np.uint8)
    encoded = np.random.default_rng(1).integers(0, 256, kind.encoded_bytes(chunk.size), np.uint8)
    kind.decode(encoded, chunk)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_chunk_with_elements_that_are_no_numbers_is_not_encoded(element: str, code: str, value: float) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=64, group_elements=16)
    elements = random_elements(element, 300, 1, 0)
    elements[123] = value
    raw = bytes_of(elements)
    assert not kind.encode(raw, np.zeros(kind.encoded_bytes(raw.size), np.uint8))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -3.0])
def test_groups_of_one_value_and_of_the_smallest_values_are_encoded(element: str, code: str, value: float) -> None:
    kind = CodecFormat(element=element, code=code, plane_elements=64, group_elements=64)
    elements = torch.full((64,), value, dtype=getattr(torch, element))
    error = (round_trip(kind, elements).double() - elements.double()).abs().max()
    assert error <= abs(value) / 16 + TINY


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", [0, 1, 31, 64, 1000])
def test_planes_of_bytes_are_lossless_on_every_instruction_set(element: str, count: int) -> None:
    raw = np.random.default_rng(count).integers(0, 256, count * codecs.ELEMENT_BYTES[element], np.uint8)
    planes, back = np.zeros_like(raw), np.zeros_like(raw)
    codecs.split(element, raw, planes)
    codecs.join(element, planes, back)
    assert (back == raw).all()
    for portable in (False, True):
        again = np.zeros_like(raw)
        _host.split(ELEMENTS.index(element), raw, again, portable)
        assert (again == planes).all()
        _host.join(ELEMENTS.index(element), planes, again, portable)
        assert (again == raw).all()


def test_the_last_plane_has_the_exponents() -> None:
    values = torch.tensor([1.5, -1.5, 1.25, 2.0, -0.5], dtype=torch.bfloat16)
    planes = np.zeros(10, np.uint8)
    codecs.split("bfloat16", bytes_of(values), planes)
    assert planes[5:].tolist() == [127, 127, 127, 128, 126]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"element": "int8"}, "no code"),
        ({"code": "int2"}, "no code"),
        ({"plane_elements": 0}, "must have elements"),
        ({"group_elements": -1}, "must have elements"),
    ],
)
def test_formats_that_cannot_be_are_refused(wrong: dict[str, object], reason: str) -> None:
    fields = {"element": "bfloat16", "code": "int8", "plane_elements": 8, "group_elements": 8} | wrong
    with pytest.raises(ValueError, match=reason):
        CodecFormat(**fields)  # type: ignore[arg-type]


def test_buffers_that_do_not_fit_are_refused() -> None:
    kind = CodecFormat(element="bfloat16", code="int8", plane_elements=8, group_elements=8)
    with pytest.raises(ValueError, match="are encoded in"):
        kind.encode(bytes(32), bytearray(3))
    with pytest.raises(ValueError, match="are encoded in"):
        kind.decode(bytes(3), bytearray(32))
    with pytest.raises(ValueError, match="not whole elements"):
        kind.encoded_bytes(33)
    with pytest.raises(ValueError, match="cannot be encoded"):
        codecs.split("int8", bytes(8), bytearray(8))
    with pytest.raises(ValueError, match="of their planes"):
        codecs.join("bfloat16", bytes(8), bytearray(6))
