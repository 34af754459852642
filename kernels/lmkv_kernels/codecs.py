"""Codecs of chunks (`kernels/csrc/codec.h`): calls check their arguments, and run without the GIL on one thread."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv_kernels import _host
from lmkv_kernels.host import Buffer, _bytes_of

ELEMENTS = ("bfloat16", "float16", "float32")
"""Element types that can be encoded, by their indices in the native code."""
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CODES = ("fp8", "int8", "int4")
"""Codes by their indices in the native code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecFormat:
    """How elements are encoded. Raises `ValueError` for an unknown type or code, or sizes that are not positive.

    A group is the elements that share a scale. It never crosses a plane, which is the keys or the values of one head.
    """

    element: str
    code: str
    plane_elements: int
    group_elements: int

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS or self.code not in CODES:
            raise ValueError(f"there is no code {self.code!r} of {self.element!r}")
        if self.plane_elements <= 0 or self.group_elements <= 0:
            raise ValueError("planes and groups must have elements")

    def encoded_bytes(self, size_bytes: int) -> int:
        """Bytes of an encoded chunk that has `size_bytes`. Raises `ValueError` if these are not whole elements."""
        return _host.encoded_bytes(*self._native, self._count(size_bytes))

    def encode(self, chunk: Buffer, encoded: Buffer) -> bool:
        """Encodes a chunk into a buffer of its `encoded_bytes`.

        False if it cannot be encoded: elements are infinite, no numbers, or too large. Raises `ValueError` if the sizes
        do not fit.
        """
        source, target = _bytes_of(chunk, "chunk"), _bytes_of(encoded, "encoded")
        self._check(source.size, target.size)
        return _host.encode(*self._native, source, target)

    def decode(self, encoded: Buffer, chunk: Buffer) -> None:
        """Decodes into the chunk's memory. Raises `ValueError` if the sizes do not fit."""
        source, target = _bytes_of(encoded, "encoded"), _bytes_of(chunk, "chunk")
        self._check(target.size, source.size)
        _host.decode(*self._native, source, target)

    @property
    def _native(self) -> tuple[int, int, int, int]:
        return ELEMENTS.index(self.element), CODES.index(self.code), self.plane_elements, self.group_elements

    def _count(self, size_bytes: int) -> int:
        return _elements(self.element, size_bytes)

    def _check(self, size_bytes: int, encoded_bytes: int) -> None:
        if encoded_bytes != self.encoded_bytes(size_bytes):
            raise ValueError(f"{size_bytes} bytes are encoded in {self.encoded_bytes(size_bytes)}, not {encoded_bytes}")


def split(element: str, chunk: Buffer, planes: Buffer) -> None:
    """Sorts bytes by their significance in their elements: those with the exponents come last, together.

    Raises `ValueError` for an unknown element type, or sizes that do not fit.
    """
    source, target = _bytes_of(chunk, "chunk"), _bytes_of(planes, "planes")
    _check_planes(element, source.size, target.size)
    _host.split(ELEMENTS.index(element), source, target)


def join(element: str, planes: Buffer, chunk: Buffer) -> None:
    """The inverse of `split`."""
    source, target = _bytes_of(planes, "planes"), _bytes_of(chunk, "chunk")
    _check_planes(element, source.size, target.size)
    _host.join(ELEMENTS.index(element), source, target)


def _check_planes(element: str, size_bytes: int, planes_bytes: int) -> None:
    _elements(element, size_bytes)
    if size_bytes != planes_bytes:
        raise ValueError(f"{size_bytes} bytes are not the {planes_bytes} of their planes")


def _elements(element: str, size_bytes: int) -> int:
    """The number of elements. Raises `ValueError` if the type is unknown, or the last element is not whole."""
    if element not in ELEMENTS:
        raise ValueError(f"element type {element!r} cannot be encoded")
    count, rest = divmod(size_bytes, ELEMENT_BYTES[element])
    if rest:
        raise ValueError(f"{size_bytes} bytes are not whole elements of {element}")
    return count
