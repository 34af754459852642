"""JSON responses and errors over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import code_pb2, status_pb2
from starlette.responses import Response

from lmkv import rpc
from lmkv.errors import LmkvError

HTTP_STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""HTTP status by gRPC code, as `google/rpc/code.proto` maps them; other codes are 500."""


class HttpError(Exception):
    """A request that is refused before a handler is called. `code` is the closest gRPC code."""

    def __init__(self, http_status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.headers = headers
        self.status = status_pb2.Status(code=getattr(code_pb2, code), message=message)


class CallAborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def to_json(message: Message) -> dict[str, Any]:
    """A message in proto3's JSON: names in lowerCamelCase, 64-bit integers as text, unset fields omitted."""
    return MessageToDict(message)


def json_response(content: Any, http_status: int = 200) -> Response:
    """A response with a JSON body."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Response(text, http_status, media_type="application/json")


def status_of(error: Exception) -> tuple[int, status_pb2.Status] | None:
    """HTTP status and `google.rpc.Status` of an expected error; None for any other one."""
    if isinstance(error, HttpError):
        return error.http_status, error.status
    if isinstance(error, LmkvError):
        status = rpc.to_status(error)
    elif isinstance(error, CallAborted):
        status = error.status
    else:
        return None
    return HTTP_STATUS.get(code_pb2.Code.Name(status.code), 500), status
