"""Server-sent events, however their bytes come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.proxy import openai
from lmkv_server.proxy.openai import EventSplitter, EventTooLong, data_of, event_of

PAYLOADS = st.lists(st.binary(max_size=20).filter(lambda data: b"\n" not in data and data == data.strip()), max_size=8)


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 200), max_size=10))
def test_events_are_split_correctly_wherever_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    sent = b"".join(map(event_of, payloads))
    bounds = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
    splitter = EventSplitter()
    received = [event for begin, end in itertools.pairwise(bounds) for event in splitter.feed(sent[begin:end])]
    assert b"".join(received) == sent
    assert [data_of(event) for event in received] == payloads


def test_a_comment_carries_nothing() -> None:
    assert data_of(b": ping\n\n") == b""


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLong):
        EventSplitter().feed(b"x" * 101)
    splitter = EventSplitter()
    assert splitter.feed(b"x" * 100) == []
    assert splitter.feed(b"\n\n" + b"y" * 100) == [b"x" * 100 + b"\n\n"], "each event may be as long"


def test_empty_lines_are_events_without_data() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"\n\n") == [b"\n\n"]
    assert splitter.feed(b"data: a\n\n\n\n") == [b"data: a\n\n", b"\n\n"]
    assert data_of(b"\n\n") == b""
