"""JSON texts of other processes, which a server reads without decoding them at once.

Decoding 32 MB takes up to 100 ms, in which no other request is served. While a text arrives, its values are counted;
then the fields that are of interest are decoded, and the long ones stay as they are: they are forwarded, not read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.runtime.memory_budget import JSON_VALUE_BYTES, MAX_JSON_OBJECTS, MAX_JSON_VALUES, WIDE_CHARACTER_BYTES
from lmkv_kernels import JsonScan, token_ids

MAX_FIELDS = 1024
"""Fields of an object that a server reads without decoding all of it."""
LONG_BYTES = 1 << 10
"""Values from this size on are not decoded unless they must be."""
SCANNED_FROM_BYTES = 64 << 10
"""Smaller texts are decoded at once, which is faster."""
_FIELD_COLUMNS = 8


class NotJson(ValueError):
    """The text is not a JSON object."""


class LongValue:
    """A long value of an object, which `encode` writes as it came: an invalid one is left to its reader.

    No dataclass: other encoders must refuse it.
    """

    __slots__ = ("comma_count", "has_words", "opened_count", "text", "text_count")

    def __init__(
        self, text: memoryview, opened_count: int, text_count: int, comma_count: int, *, has_words: bool
    ) -> None:
        self.text = text
        self.opened_count = opened_count
        """Objects and lists, itself included."""
        self.text_count = text_count
        """Texts, names of fields included."""
        self.comma_count = comma_count
        """Commas between its own elements."""
        self.has_words = has_words
        """Whether it has values other than objects, lists, texts and whole numbers from 0 on."""

    @property
    def is_text(self) -> bool:
        """Whether it is one text."""
        return self.text[0] == ord('"')

    @property
    def is_list(self) -> bool:
        """Whether it is a list."""
        return self.text[0] == ord("[")

    @property
    def has_only_numbers(self) -> bool:
        """Whether it is a list of whole numbers, which may be too large, but not negative."""
        return self.is_list and self.opened_count == 1 and not self.text_count and not self.has_words

    @property
    def only(self) -> LongValue:
        """The element of a list with one list or text; otherwise the value itself."""
        if not self.is_list or self.comma_count or self.opened_count + self.text_count != 2:
            return self
        inner = self.text[1:-1]
        begin = next((at for at, one in enumerate(inner) if not _is_space(one)), 0)
        end = next((at for at in range(len(inner), begin, -1) if not _is_space(inner[at - 1])), begin)
        if end - begin < 2 or inner[begin] not in b'["':
            return self
        return LongValue(inner[begin:end], self.opened_count - 1, self.text_count, 0, has_words=self.has_words)

    def tokens(self) -> NDArray[np.uint32]:
        """The numbers of a list. Raises `ValueError` if one is no token id."""
        return token_ids(self.text)


class JsonText:
    """A text whose parts arrive: an upper bound of the memory that it takes once decoded, and its fields."""

    def __init__(self) -> None:
        self._scan = JsonScan(MAX_FIELDS)
        self.text = b""
        """The whole text, which its reader sets once all parts were added."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the parts so far."""
        return self._scan.size

    @property
    def size_bytes(self) -> int:
        """The bound for the parts so far, the text itself included."""
        scan = self._scan
        character_bytes = 1 if scan.is_ascii else WIDE_CHARACTER_BYTES
        value_count = scan.commas + scan.opened + scan.colons
        return scan.size * (1 + character_bytes) + value_count * JSON_VALUE_BYTES

    @property
    def has_too_many_values(self) -> bool:
        """Whether the parts so far would be decoded for too long."""
        return self._scan.commas > MAX_JSON_VALUES or self._scan.texts + self._scan.opened > MAX_JSON_OBJECTS

    def add(self, part: bytes) -> None:
        """Scans the next part."""
        self._scan.add(part)

    def fields(self, needed: Container[str] = ()) -> dict[str, Any]:
        """The fields of the object: long values as `LongValue`, except for the `needed` ones. Raises `NotJson`.

        What is wrong inside a long value is not noticed; `LongValue` is what it is up to its end by any reader.
        """
        if len(self.text) < SCANNED_FROM_BYTES or self._scan.has_more_fields:
            return decode_object(self.text)
        if not self._scan.is_object:
            decode_object(self.text)  # it says what is wrong
            raise NotJson("it is not an object")
        view = memoryview(self.text)
        rows = np.frombuffer(self._scan.fields, np.uint64).reshape(-1, _FIELD_COLUMNS).tolist()
        found: dict[str, Any] = {}
        for name_begin, name_end, begin, end, opened_count, text_count, comma_count, has_words in rows:
            name: str = _decoded(view[name_begin:name_end])
            text = view[begin:end]
            if len(text) < LONG_BYTES or name in needed:
                found[name] = _decoded(text)
            else:
                found[name] = LongValue(text, opened_count, text_count, comma_count, has_words=bool(has_words))
        return found


def json_bytes(body: bytes) -> int:
    """The bound of a whole text."""
    text = JsonText()
    text.add(body)
    return text.size_bytes


def decode_object(text: bytes) -> dict[str, Any]:
    """Decodes a whole text. Raises `NotJson`."""
    content = _decoded(text)
    if not isinstance(content, dict):
        raise NotJson("it is not an object")
    return content


def _decoded(text: bytes | memoryview) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(str(error)) from None


def _raw(value: Any) -> msgspec.Raw:
    if isinstance(value, LongValue):
        return msgspec.Raw(value.text)
    raise NotImplementedError(f"{type(value)} has no JSON")


_encode = msgspec.json.Encoder(enc_hook=_raw).encode

Encoded = bytes | Sequence[bytes | memoryview]
"""A text, or the pieces of one."""


def encode(fields: Mapping[str, Any]) -> Encoded:
    """Encodes an object. Long values of its own are pieces, which are not copied."""
    pieces: list[bytes | memoryview] = []
    short: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, LongValue):
            pieces += (b"," if pieces else b"{", _encode(name), b":", value.text)
        else:
            short[name] = value
    if not pieces:
        return _encode(short)
    return [*pieces, b"," if short else b"", _encode(short)[1:]]


def _is_space(octet: int) -> bool:
    return octet in b" \t\n\r"
