"""The tracing API of lmkv. Spans record nothing unless `set_tracer` was called.

Context passes between processes and hooks as a W3C `traceparent`; inside a task it is the span that was entered.
Attributes are keywords and are exported as `lmkv.NAME`; those of OpenTelemetry's semantic conventions are set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, TypeAlias

Value: TypeAlias = str | int | float | bool | Sequence[str]

TRACEPARENT = "traceparent"
"""Key of gRPC metadata and HTTP header."""


class SpanKind(Enum):
    """The role of a span in a call."""

    INTERNAL = "INTERNAL"
    CLIENT = "CLIENT"
    SERVER = "SERVER"


class Span:
    """One step of a request. This base class records nothing; it is used when tracing is off.

    Entering it makes it the parent of spans that begin inside; leaving it ends it. `end` ends it without entering.
    """

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """W3C trace context for another process; empty if the span is not recorded."""
        return ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """`traceparent` as metadata of a gRPC call."""
        return ()

    def set(self, **attributes: Value) -> None:
        """Sets attributes."""

    def fail(self, reason: str, message: str = "") -> None:
        """Marks the span as failed. `reason` has low cardinality; `message` is free text."""

    def set_rpc_status(self, code: str) -> None:
        """Sets the gRPC status code of the call. Other codes than OK are failures."""

    def set_http_status(self, status: int) -> None:
        """Sets the HTTP status of the response. Only 5xx is a failure."""

    def end(self) -> None:
        """Ends the span. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


NO_SPAN = Span()


class Tracer(Protocol):
    """Creates spans that are recorded."""

    def begin(
        self, name: str, kind: SpanKind, parent: str | None, attributes: Mapping[str, Value], seconds: float = 0.0
    ) -> Span:
        """Begins a span, `seconds` ago.

        `parent` is a `traceparent`; None means the current span, if any. An empty one makes a root span.
        """
        ...

    def current_ids(self) -> tuple[str, str] | None:
        """Trace id and span id of the current span in hexadecimal, if any."""
        ...


_tracer: Tracer | None = None  # global, as logging is


def set_tracer(tracer: Tracer | None) -> None:
    """Sets the tracer that records spans; None stops recording."""
    global _tracer
    _tracer = tracer


def tracing() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def current_ids() -> tuple[str, str] | None:
    """Trace id and span id of the current span in hexadecimal, if any."""
    return _tracer.current_ids() if _tracer else None


def begin(name: str, *, parent: str | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Value) -> Span:
    """Begins a span under `parent`, a `traceparent`. Empty: a root span; None: under the current span, if any."""
    if _tracer is None:
        return NO_SPAN
    return _tracer.begin(name, kind, parent, prefixed(attributes))


def follow(name: str, traceparent: str, *, kind: SpanKind = SpanKind.SERVER, **attributes: Value) -> Span:
    """Begins a span in the trace of another process; records nothing if `traceparent` is empty."""
    if _tracer is None or not traceparent:
        return NO_SPAN
    return _tracer.begin(name, kind, traceparent, prefixed(attributes))


def record(name: str, seconds: float, *, parent: str, **attributes: Value) -> None:
    """Records a span that ends now and began `seconds` ago; records nothing if `parent` is empty."""
    if _tracer is not None and parent:
        _tracer.begin(name, SpanKind.INTERNAL, parent, prefixed(attributes), seconds).end()


def call(method: str, address: str) -> Span:
    """The client span of a unary gRPC call of `SERVICE/METHOD`; records nothing outside of a trace."""
    if _tracer is None or _tracer.current_ids() is None:
        return NO_SPAN
    host, _, port = address.rpartition(":")
    where: dict[str, Value] = {"server.address": host, "server.port": int(port)} if port.isdecimal() else {}
    return _tracer.begin(method, SpanKind.CLIENT, None, _rpc(method) | where)


def serve(method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
    """The server span of a unary gRPC call, in the trace of the metadata or in a new one.

    gRPC's own services, which probes call often, begin no trace.
    """
    if _tracer is None:
        return NO_SPAN
    parent = next((str(value) for key, value in metadata or () if key == TRACEPARENT), "")
    if not parent and method.startswith("grpc."):
        return NO_SPAN
    return _tracer.begin(method, SpanKind.SERVER, parent, _rpc(method))


def serve_http(method: str, route: str, traceparent: str) -> Span:
    """The server span of an HTTP request, in the trace of the header.

    Without a header only a `POST` begins a trace, since pages, probes and scrapes are frequent.
    """
    if _tracer is None or not (traceparent or method == "POST"):
        return NO_SPAN
    attributes: dict[str, Value] = {"http.request.method": method, "http.route": route}
    return _tracer.begin(f"{method} {route}", SpanKind.SERVER, traceparent, attributes)


def prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes with the prefix `lmkv.`."""
    return {f"lmkv.{name}": value for name, value in attributes.items()}


def _rpc(method: str) -> dict[str, Value]:
    return {"rpc.system.name": "grpc", "rpc.method": method}
