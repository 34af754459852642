"""Records that instances report are rebuilt from what is valid in them: a bad one is refused, and breaks no list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lmkv.errors import BadMessage
from lmkv.v1.cache_service_pb2 import ClearProgress, MoveProgress, MoveResult
from lmkv.v1.registry_service_pb2 import OperationRecord
from lmkv_server.coordinator.operations.operation_proto import from_record, to_proto

LONGEST_SECONDS = 60.0
IMPOSSIBLE = Timestamp(seconds=10**18)


def record(progress: Message | None = None, result: Message | None = None, name: str = "move-1") -> OperationRecord:
    """A record of a move, with this in its fields of any type."""
    made = OperationRecord()
    made.operation.name, made.operation.done = name, result is not None
    made.operation.metadata.Pack(progress or MoveProgress())
    if result is not None:
        made.operation.response.Pack(result)
    return made


def of_type(url: str, value: bytes = b"") -> Callable[[OperationRecord], None]:
    """Puts this into the progress of a record."""
    return lambda made: made.operation.metadata.CopyFrom(Any(type_url=url, value=value))


KNOWN_URL = "type.googleapis.com/lmkv.v1.MoveProgress"


@pytest.mark.parametrize(
    "made",
    [
        record(MoveProgress(create_time=IMPOSSIBLE)),
        record(MoveProgress(end_time=Timestamp(nanos=-1))),
        record(ClearProgress()),
        record(result=ClearProgress()),
        record(name="nonsense-1"),
        record(name=""),
    ],
    ids=("create time", "end time", "another progress", "another result", "unknown kind", "no name"),
)
def test_a_record_that_could_not_be_shown_is_refused(made: OperationRecord) -> None:
    with pytest.raises(BadMessage):
        from_record(made, LONGEST_SECONDS)


@pytest.mark.parametrize(
    "change",
    [of_type("type.googleapis.com/no.such.Type"), of_type("no url"), of_type(KNOWN_URL, b"\xff\xff\xff")],
    ids=("unknown type", "no url", "garbage"),
)
def test_progress_of_an_unknown_type_is_refused(change: Callable[[OperationRecord], None]) -> None:
    made = record()
    change(made)
    with pytest.raises(BadMessage):
        from_record(made, LONGEST_SECONDS)


def test_an_error_of_a_record_is_rebuilt_without_what_is_unknown_in_it() -> None:
    made = record()
    made.operation.done = True
    made.operation.error.code, made.operation.error.message = 5, "gone"
    made.operation.error.details.add(type_url="type.googleapis.com/no.such.Type", value=b"\xff")
    shown = to_proto(from_record(made, LONGEST_SECONDS))
    assert shown.error.message == "gone"
    assert MessageToDict(shown)["done"] is True, "JSON knows every type in it"


def test_a_valid_record_is_kept() -> None:
    shown = to_proto(from_record(record(result=MoveResult()), LONGEST_SECONDS))
    assert (shown.name, shown.done) == ("move-1", True)
