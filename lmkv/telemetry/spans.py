"""Spans, as the rest of lmkv writes them. Who records them, if anybody does, is decided once per process.

Context crosses processes and hooks as one W3C `traceparent` string; inside a task it is simply the span that is
entered. Attributes are keywords and appear as `lmkv.NAME`; those of OpenTelemetry's semantic conventions are set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, TypeAlias

Value: TypeAlias = str | int | float | bool | Sequence[str]

TRACEPARENT = "traceparent"
"""Key of gRPC metadata, and of the trace headers of requests."""


class SpanKind(Enum):
    """Which end of a conversation a span is."""

    INTERNAL = "INTERNAL"
    CLIENT = "CLIENT"
    SERVER = "SERVER"


class Span:
    """One step of a request. This one records nothing; it is what everybody gets where nobody traces.

    Entering it makes it the parent of what the task does inside; leaving it ends it. Or `end` it by hand.
    """

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """What continues the trace elsewhere; empty if there is none."""
        return ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The same as metadata of a gRPC call."""
        return ()

    def set(self, **attributes: Value) -> None:
        """Adds what is known by now."""

    def fail(self, reason: str, message: str = "") -> None:
        """It did not do what it was for: `reason` is one word of a few, `message` is for people."""

    def set_rpc_status(self, code: str) -> None:
        """The gRPC code that its call ended with."""

    def set_http_status(self, status: int) -> None:
        """The HTTP status that its request is answered with. Only a server's own fault, 5xx, is a failure."""

    def end(self) -> None:
        """It is over. Repeating it is safe."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


NO_SPAN = Span()


class Tracer(Protocol):
    """Makes spans that are recorded."""

    def begin(
        self, name: str, kind: SpanKind, parent: str | None, attributes: Mapping[str, Value], seconds: float = 0.0
    ) -> Span:
        """A span that began `seconds` ago.

        Its parent is `parent`, a `traceparent`; None means the span that the task is in. If that is none, it is a root.
        """
        ...

    def current_ids(self) -> tuple[str, str] | None:
        """Trace id and span id of the span that the task is in, in hexadecimal, if any."""
        ...


_tracer: Tracer | None = None  # the process's, as its logging is: spans are begun wherever something happens


def use(tracer: Tracer | None) -> None:
    """Decides who records spans from now on."""
    global _tracer
    _tracer = tracer


def tracing() -> bool:
    """Whether anybody records spans."""
    return _tracer is not None


def current_ids() -> tuple[str, str] | None:
    """Trace id and span id of the span that the task is in, in hexadecimal, if any."""
    return _tracer.current_ids() if _tracer else None


def begin(name: str, *, parent: str | None = None, kind: SpanKind = SpanKind.INTERNAL, **attributes: Value) -> Span:
    """A span under `parent`, a `traceparent`; empty: a root; None: under the span that the task is in, if any."""
    if _tracer is None:
        return NO_SPAN
    return _tracer.begin(name, kind, parent, prefixed(attributes))


def follow(name: str, traceparent: str, *, kind: SpanKind = SpanKind.SERVER, **attributes: Value) -> Span:
    """A span that continues another process's trace; nothing if that process does not trace."""
    if _tracer is None or not traceparent:
        return NO_SPAN
    return _tracer.begin(name, kind, traceparent, prefixed(attributes))


def record(name: str, seconds: float, *, parent: str, **attributes: Value) -> None:
    """A span of something that is over and took so long, up to now; nothing if `parent` is empty."""
    if _tracer is not None and parent:
        _tracer.begin(name, SpanKind.INTERNAL, parent, prefixed(attributes), seconds).end()


def call(method: str, address: str) -> Span:
    """The caller's side of a unary gRPC call of `SERVICE/METHOD`; nothing outside of a trace."""
    if _tracer is None or _tracer.current_ids() is None:
        return NO_SPAN
    host, _, port = address.rpartition(":")
    where: dict[str, Value] = {"server.address": host, "server.port": int(port)} if port.isdecimal() else {}
    return _tracer.begin(method, SpanKind.CLIENT, None, _rpc(method) | where)


def serve(method: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
    """The server's side of a unary gRPC call; it continues the trace that the metadata names, or begins one.

    gRPC's own services, which probes call all the time, begin none.
    """
    if _tracer is None:
        return NO_SPAN
    parent = next((str(value) for key, value in metadata or () if key == TRACEPARENT), "")
    if not parent and method.startswith("grpc."):
        return NO_SPAN
    return _tracer.begin(method, SpanKind.SERVER, parent, _rpc(method))


def serve_http(method: str, route: str, traceparent: str) -> Span:
    """The server's side of an HTTP request; it continues the trace that the header names.

    Without one only a `POST` begins a trace: pages, probes and scrapes are fetched all the time.
    """
    if _tracer is None or not (traceparent or method == "POST"):
        return NO_SPAN
    attributes: dict[str, Value] = {"http.request.method": method, "http.route": route}
    return _tracer.begin(f"{method} {route}", SpanKind.SERVER, traceparent, attributes)


def prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes under lmkv's own prefix."""
    return {f"lmkv.{name}": value for name, value in attributes.items()}


def _rpc(method: str) -> dict[str, Value]:
    return {"rpc.system.name": "grpc", "rpc.method": method}
