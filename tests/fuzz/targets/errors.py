"""Statuses that another process sent: they become errors of lmkv, whose retry delays are bounded."""

from __future__ import annotations

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from lmkv.errors import MAX_RETRY_SECONDS, Full, LmkvError, NoFreeExtents, TooManyRequests
from lmkv.rpc.error_status import from_status, to_status
from tests.fuzz.promises import check_status

COVERS = ("lmkv.rpc.error_status", "lmkv.errors", "lmkv.safe_text")
INFO = "type.googleapis.com/google.rpc.ErrorInfo"


def _status(error: LmkvError, **metadata: str) -> bytes:
    error.metadata |= metadata
    return bytes(to_status(error).SerializeToString())


SEEDS = [
    _status(TooManyRequests("slow down", retry_seconds=2.5)),
    *(_status(NoFreeExtents("full"), retry_seconds=text) for text in ("inf", "nan", "1e300", "-1", "x")),
    _status(NoFreeExtents("full"), message="a name that is an argument", self="another"),
    _status(LmkvError("unknown"), code="x"),
    status_pb2.Status(code=9, details=[any_pb2.Any(type_url=INFO, value=b"\x0a\xff")]).SerializeToString(),
    status_pb2.Status(code=5, message="not of lmkv").SerializeToString(),
]


def run(data: bytes) -> None:
    """The input is a `google.rpc.Status`."""
    try:
        status = status_pb2.Status.FromString(data)
    except DecodeError:
        return
    error = from_status(status)
    assert isinstance(error, LmkvError)
    if isinstance(error, Full):
        assert 0 <= error.retry_seconds <= MAX_RETRY_SECONDS
    try:
        forwarded = to_status(error)
    except UnicodeEncodeError:
        raise AssertionError("an error that was received cannot be sent") from None
    if type(error) is not LmkvError:
        again = from_status(forwarded)
        assert type(again) is type(error)
        if len(error.metadata) <= 8:  # a status of lmkv's own has no more
            check_status(error)
