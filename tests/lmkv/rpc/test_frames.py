"""Frames: cut at any byte they arrive as they were sent, and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadMessage, MessageTooLarge
from lmkv.rpc.frames import HEADER, FrameBuffer, FrameKind, to_frame

LIMIT = 64
Frames = list[tuple[FrameKind, bytes]]

frames = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=LIMIT)), max_size=8)


def taken(buffer: FrameBuffer) -> Frames:
    found = []
    while frame := buffer.take():
        found.append(frame)
    return found


@given(sent=frames, data=st.data())
def test_frames_that_are_cut_anywhere_arrive_as_they_were_sent(sent: Frames, data: st.DataObject) -> None:
    stream = b"".join(to_frame(kind, payload, LIMIT) for kind, payload in sent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)))))
    buffer, arrived = FrameBuffer(LIMIT), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer.add(memoryview(stream)[start:end])
        arrived += taken(buffer)
    assert arrived == sent


def test_a_frame_is_complete_with_its_last_byte_only() -> None:
    frame = to_frame(FrameKind.MESSAGE, b"abc", LIMIT)
    buffer = FrameBuffer(LIMIT)
    for at in range(len(frame) - 1):
        buffer.add(frame[at : at + 1])
        assert buffer.take() is None
    buffer.add(frame[-1:])
    assert buffer.take() == (FrameKind.MESSAGE, b"abc")


def test_a_frame_over_the_limit_is_refused_by_its_head() -> None:
    buffer = FrameBuffer(LIMIT)
    buffer.add(to_frame(FrameKind.MESSAGE, b"before", LIMIT) + HEADER.pack(FrameKind.MESSAGE, LIMIT + 1))
    assert buffer.take() == (FrameKind.MESSAGE, b"before")
    with pytest.raises(MessageTooLarge, match="a frame has 65 bytes; at most 64 are accepted") as refusal:
        buffer.take()
    assert refusal.value.metadata == {"size_bytes": "65", "limit": "64"}


def test_a_frame_of_the_largest_size_is_sent_and_accepted() -> None:
    buffer = FrameBuffer(LIMIT)
    buffer.add(to_frame(FrameKind.MESSAGE, bytes(LIMIT), LIMIT))
    assert buffer.take() == (FrameKind.MESSAGE, bytes(LIMIT))


def test_another_protocol_is_refused() -> None:
    buffer = FrameBuffer(LIMIT)
    buffer.add(b"PRI * HTTP/2.0\r\n")
    with pytest.raises(BadMessage, match="frames of kind 80 do not exist"):
        buffer.take()


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(MessageTooLarge, match="the message has 65 bytes; at most 64 can be sent"):
        to_frame(FrameKind.MESSAGE, bytes(LIMIT + 1), LIMIT)


def test_the_bytes_of_a_frame_are_those_of_the_protocol() -> None:
    kinds = [FrameKind.MESSAGE, FrameKind.STATUS, FrameKind.PING, FrameKind.PONG]
    sent = [to_frame(kind, b"ab", LIMIT) for kind in kinds]
    assert sent == [bytes([number, 0, 0, 0, 2]) + b"ab" for number in range(4)]
    assert list(FrameKind) == kinds
