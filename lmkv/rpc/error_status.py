"""Converts `lmkv.errors` to `google.rpc.Status` and back."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from lmkv.errors import Full, LmkvError, Unreachable
from lmkv.safe_text import safe_text

DOMAIN = "lmkv.v1"
MAX_TEXT = 500
"""Maximum characters of a message and of a metadata value: trailers are limited, and messages quote inputs."""


def short(text: str) -> str:
    """The text, truncated to `MAX_TEXT`."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def to_status(error: LmkvError) -> status_pb2.Status:
    """The error as `google.rpc.Status` with one `ErrorInfo`, and `RetryInfo` for a `Full` error."""
    status = status_pb2.Status(code=getattr(code_pb2, error.code), message=safe_text(str(error), MAX_TEXT))
    metadata = {name: short(value) for name, value in error.metadata.items()}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)]
    if isinstance(error, Full):
        delay = error.retry_seconds
        details.append(
            error_details_pb2.RetryInfo(
                retry_delay=duration_pb2.Duration(nanos=round(delay % 1 * 1e9), seconds=int(delay))
            )
        )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail, deterministic=True)  # equal errors have equal bytes
        status.details.append(packed)
    return status


def from_status(status: status_pb2.Status) -> LmkvError:
    """The error of a status; a plain `LmkvError` if its reason is unknown to this version."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if _unpack(detail, info) and info.domain == DOMAIN and info.reason in LmkvError.by_reason:
            error = LmkvError.by_reason[info.reason](status.message)
            error.metadata = dict(info.metadata)  # its names may be those of arguments
            return error
    return LmkvError(status.message, code=status.code)


def _unpack(detail: any_pb2.Any, info: error_details_pb2.ErrorInfo) -> bool:
    try:
        return bool(detail.Unpack(info))
    except DecodeError:
        return False


def from_rpc_error(error: grpc.RpcError) -> LmkvError:
    """The error of a failed call: as the server returned it, else `Unreachable` or a plain `LmkvError`."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # the status in the trailers contradicts the call's own
        status = None
    if status is not None:
        return from_status(status)
    code = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    text = error.details() if callable(getattr(error, "details", None)) else str(error)
    cls = Unreachable if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) else LmkvError
    fix = next((f"; {fix}" for part, fix in _TLS_FIXES.items() if part in str(text)), "")
    return cls(f"{code.name}: {text}{fix}", grpc_code=code.name)


_TLS_FIXES = {
    "WRONG_VERSION_NUMBER": "the server does not use TLS: unset tls_ca here, or set tls_cert and tls_key there",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate has expired or is not issued by a CA in tls_ca",
    "Hostname Verification Check failed": "the server's certificate is issued for another name than the address",
    "failed to connect to all addresses; last error: UNAVAILABLE": (
        "if the server uses TLS, set tls_ca here, and if it requires client certificates, tls_cert and tls_key too"
    ),
}
"""Fixes of TLS mismatches, by a part of gRPC's message."""
