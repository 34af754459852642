"""JSON texts are read without decoding their long values, as a decoder of the whole text would read them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmkv.runtime.memory_budget import MAX_JSON_OBJECTS, MAX_JSON_VALUES
from lmkv_server.http import json_text
from lmkv_server.http.json_text import MAX_FIELDS, JsonText, LongValue, NotJson, encode, json_bytes

TEXTS = st.text(alphabet='a,[]{}:"\\\n\u00e9\U0001f600 ', max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r ")])


def scanned(text: bytes, part_size: int = 1 << 16) -> JsonText:
    found = JsonText()
    for start in range(0, len(text), part_size):
        found.add(text[start : start + part_size])
    found.text = text
    return found


def joined(fields: dict[str, Any]) -> bytes:
    pieces = encode(fields)
    return pieces if isinstance(pieces, bytes) else b"".join(pieces)


def decoded(value: Any) -> Any:
    return msgspec.json.decode(value.text) if isinstance(value, LongValue) else value


@pytest.fixture(autouse=True)
def _all_values_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "SCANNED_FROM_BYTES", 0)
    monkeypatch.setattr(json_text, "LONG_BYTES", 0)


@given(
    st.lists(st.tuples(TEXTS | st.sampled_from(["prompt", "model"]), VALUES), max_size=6),
    SEPARATORS,
    st.booleans(),
    st.integers(1, 40),
    st.sets(st.sampled_from(["prompt", "model"])),
)
def test_an_object_is_what_a_decoder_of_the_whole_reads(
    pairs: Sequence[tuple[str, Any]],
    separators: tuple[str, str],
    is_ascii: bool,
    part_size: int,
    needed: set[str],
) -> None:
    """Names may be repeated: the last value counts."""
    comma, colon = separators
    dumped = [[json.dumps(one, ensure_ascii=is_ascii, separators=separators) for one in pair] for pair in pairs]
    text = f" {{ {comma.join(colon.join(pair) for pair in dumped)} }}\n".encode()
    fields = scanned(text, part_size).fields(needed)
    assert {name: decoded(value) for name, value in fields.items()} == msgspec.json.decode(text)
    assert msgspec.json.decode(joined(fields)) == msgspec.json.decode(text)
    assert all(isinstance(value, LongValue) != (name in needed) for name, value in fields.items())


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.data())
@example({"a": [1]}, None)
def test_what_is_not_json_is_refused_or_stays_so(content: dict[str, Any], data: Any) -> None:
    """An engine gets no other object than that which was read here."""
    text = json.dumps(content).encode()
    if data is not None:
        at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = (
            text[:at]
            + data.draw(st.sampled_from([b"", b"]", b"}", b"{", b'"', b",", b"\\", b":", b"\xff"]))
            + text[end:]
        )
    found = scanned(text)
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        whole = None
    try:
        fields = found.fields()
    except NotJson:
        assert not isinstance(whole, dict)
        return
    if whole is not None:
        assert msgspec.json.decode(joined(fields)) == whole
    elif len(fields) == text.count(b'":'):  # a repeated name may have hidden what is wrong
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            msgspec.json.decode(joined(fields))


@given(VALUES | st.lists(st.integers(0, 2**32 - 1), max_size=9) | st.lists(TEXTS, max_size=2), SEPARATORS)
def test_a_long_value_knows_its_shape(value: Any, separators: tuple[str, str]) -> None:
    text = json.dumps({"value": value}, separators=separators).encode()
    found = scanned(text).fields()["value"]
    assert isinstance(found, LongValue)
    assert found.is_text == isinstance(value, str)
    assert found.is_list == isinstance(value, list)
    if isinstance(value, list):
        plain = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)
        assert found.has_only_numbers == plain
        assert found.comma_count == max(len(value) - 1, 0)
        if plain and all(one < 2**32 for one in value):
            assert found.tokens().tolist() == value
        if len(value) == 1 and (isinstance(value[0], str) or value[0] == [] or (plain_list(value[0]))):
            assert decoded(found.only) == value[0]
            assert found.only.has_only_numbers == isinstance(value[0], list)
            return
    assert decoded(found.only) in (value, value[0] if isinstance(value, list) and value else value)


def plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def test_no_other_encoder_takes_a_long_value() -> None:
    fields = scanned(b'{"prompt": "text"}').fields()
    with pytest.raises(TypeError):
        msgspec.json.encode(fields)
    with pytest.raises(TypeError):
        json.dumps(fields)


def test_long_values_are_encoded_inside_of_others_too() -> None:
    fields = scanned(b'{"documents": ["a", "b"], "x": 1}').fields({"x"})
    assert msgspec.json.decode(joined({"more": fields})) == {"more": {"documents": ["a", "b"], "x": 1}}


def test_an_object_with_very_many_fields_is_decoded_whole() -> None:
    content = {str(number): "text" for number in range(MAX_FIELDS + 1)}
    assert scanned(json.dumps(content).encode()).fields() == content


@pytest.mark.parametrize("text", [b"", b"[]", b"text", b'"text"', b"{", b'{"a": 1}}', b'{"a" 1}', b"{]", b'{"a": ]}'])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(NotJson):
        scanned(text).fields()


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='a,[{:"\\\n\u00e9\U0001f600'),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a,{"\\'), inner, max_size=4),
        max_leaves=20,
    ),
    st.integers(1, 7),
    st.booleans(),
)
def test_values_are_counted_outside_of_texts_however_they_arrive(content: Any, part_size: int, is_ascii: bool) -> None:
    def count(value: Any) -> tuple[int, int]:
        """Commas; and objects, lists and texts."""
        if isinstance(value, dict):
            inner = [*map(count, value), *map(count, value.values())]
        elif isinstance(value, list):
            inner = [*map(count, value)]
        else:
            return 0, isinstance(value, str)
        return max(len(value) - 1, 0) + sum(one for one, _ in inner), 1 + sum(other for _, other in inner)

    text = json.dumps(content, ensure_ascii=is_ascii).encode()
    scan = scanned(text, part_size)._scan
    assert (scan.commas, scan.texts + scan.opened) == count(content)


@pytest.mark.parametrize(
    ("value", "most"), [("1,", MAX_JSON_VALUES), ("{},", MAX_JSON_OBJECTS), ('"a",', MAX_JSON_OBJECTS)]
)
def test_values_that_take_long_to_decode_are_too_many(value: str, most: int) -> None:
    values = JsonText()
    values.add(b"[" + value.encode() * (most - 1))
    assert not values.has_too_many_values
    values.add(value.encode() * 2)
    assert values.has_too_many_values


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * 50_000 + "1]",
        "[" + "[]," * 50_000 + "1]",
        "[" + "{}," * 50_000 + "1]",
        "[" + '"a",' * 50_000 + "1]",
        "[" + '{"a":[123456789]},' * 20_000 + "1]",
        json.dumps({"image": "A" * 500_000}),
        json.dumps({str(number): number for number in range(50_000)}),
        json.dumps(["\U0001f600" + "a" * 30_000] * 10, ensure_ascii=False),
    ],
    ids=("numbers", "lists", "objects", "texts", "nested", "text", "fields", "wide"),
)
def test_no_json_takes_more_memory_than_its_bound(text: str) -> None:
    body = text.encode()
    tracemalloc.start()
    try:
        content = msgspec.json.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert content
    assert len(body) + taken <= json_bytes(body)
    size = JsonText()
    for start in range(0, len(body), 10_001):
        size.add(body[start : start + 10_001])
    assert (size.size_bytes, size.text_bytes) == (json_bytes(body), len(body)), "however it arrives"


def test_a_text_alone_costs_little() -> None:
    body = json.dumps({"image": "A" * 500_000}).encode()
    assert json_bytes(body) < 2.1 * len(body)
