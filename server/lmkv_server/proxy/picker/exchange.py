"""The endpoint picker protocol for one HTTP request: which message answers which.

How the data plane sends the request's body decides when its engine is picked:

    FULL_DUPLEX_STREAMED   after the body; its parts are held back, and returned unchanged after the choice
    BUFFERED               after the body, which is one message
    others                 at the headers, without the prompt

A data plane that does not send its modes uses FULL_DUPLEX_STREAMED, as the protocol requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from google.protobuf.struct_pb2 import ListValue, Struct

from lmkv.ext_proc.external_processor_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    BodyMutation,
    BodyResponse,
    BodySendMode,
    CommonResponse,
    HeaderMap,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    StatusCode,
    StreamedBodyResponse,
    TrailersResponse,
)
from lmkv_server.proxy.openai import error_body

ENDPOINT = "x-gateway-destination-endpoint"
"""Header and metadata key of the picked endpoint, `ip:port`."""
SUBSET = "x-gateway-destination-endpoint-subset"
SERVED = "x-gateway-destination-endpoint-served"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
RETRY_AFTER: Mapping[str, str] = {"retry-after": "1"}
MAX_PART_BYTES = 62_000
"""Maximum size of a part of a body that is returned: data planes limit them to 64 KiB."""


class _Part(NamedTuple):
    """A part of a body. A message would copy it at each access."""

    body: bytes
    is_last: bool


class OnPart(Protocol):
    """Takes a part of a body, in order."""

    def __call__(self, part: bytes, *, is_last: bool) -> None: ...


class Exchange:
    """One HTTP request and its response.

    `receive` takes each message of the data plane. While `is_waiting`, the caller has to `pick` or to `refuse`.
    """

    def __init__(self, max_body_bytes: int, on_part: OnPart) -> None:
        """`on_part` is called with each part of a body that is held back until the choice."""
        self.path = ""
        """Path of the request, without its query."""
        self.headers: Mapping[str, str] = {}
        """Headers of the request, in lower case."""
        self.subset: frozenset[str] | None = None
        """The endpoints from which the data plane allows to pick; None: all."""
        self.served = ""
        """The endpoint that served the request, as the data plane reports it with the response."""
        self.is_waiting = False
        """Whether the choice is due."""
        self.is_over = False
        """Whether the response is complete, or the request was refused."""
        self._max_body_bytes = max_body_bytes
        self._is_picked = False
        self._is_observed = False
        self._request_mode: BodySendMode.ValueType = FULL_DUPLEX_STREAMED
        self._response_mode: BodySendMode.ValueType = FULL_DUPLEX_STREAMED
        self._on_part = on_part
        self._held: list[_Part] = []
        self._held_bytes = 0
        self._pending = ""
        """The phase whose answer carries the choice."""
        self._has_trailers = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the body that are held back."""
        return self._held_bytes if self._held else 0

    @property
    def is_too_large(self) -> bool:
        """Whether the body exceeds the limit."""
        return self._held_bytes > self._max_body_bytes

    @property
    def has_body(self) -> bool:
        """Whether the request's body is known: it is not if it is too large, or was not sent before the choice."""
        return bool(self._held) and not self.is_too_large

    @property
    def body(self) -> bytes | None:
        """The request's body; None if it is not known."""
        return b"".join(self.parts) if self.has_body else None

    @property
    def parts(self) -> list[bytes]:
        """The parts of the request's body that are held back."""
        return [part.body for part in self._held]

    def receive(self, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        """The answers to a message that do not depend on the choice."""
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._is_observed |= message.observability_mode
        if self._is_observed:
            return
        phase = message.WhichOneof("request")
        if phase == "request_headers":
            yield from self._request_headers(message.request_headers, message.metadata_context)
        elif phase == "request_body":
            yield from self._request_body(message.request_body)
        elif phase == "request_trailers":
            if self._is_picked or self._request_mode != FULL_DUPLEX_STREAMED:
                yield ProcessingResponse(request_trailers=TrailersResponse())
            else:
                self._has_trailers = self.is_waiting = True
        elif phase == "response_headers":
            served = message.metadata_context.filter_metadata
            if LB_NAMESPACE in served:
                self.served = _text(served[LB_NAMESPACE], SERVED)
            self.is_over |= message.response_headers.end_of_stream
            yield ProcessingResponse(response_headers=HeadersResponse(response=CommonResponse()))
        elif phase == "response_body":
            self.is_over |= message.response_body.end_of_stream
            if self._response_mode == FULL_DUPLEX_STREAMED:
                yield from (
                    ProcessingResponse(response_body=part)
                    for part in _returned(_Part(message.response_body.body, message.response_body.end_of_stream))
                )
            else:
                yield ProcessingResponse(response_body=BodyResponse(response=CommonResponse()))
        elif phase == "response_trailers":
            self.is_over = True
            yield ProcessingResponse(response_trailers=TrailersResponse())

    def pick(
        self, endpoint: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[ProcessingResponse]:
        """The answers that carry the choice, and the parts of the body that were held back.

        `body` replaces the body. `headers` are set; one with an empty value is removed.
        """
        self.is_waiting, self._is_picked = False, True
        held, self._held = self._held, []
        changed = {**(headers or {}), **({} if body is None else {"content-length": str(len(body))})}
        mutation = HeaderMutation(
            set_headers=[_header(ENDPOINT, endpoint), *(_header(*one) for one in changed.items() if one[1])],
            remove_headers=[name for name, value in changed.items() if not value],
        )
        chosen = CommonResponse(header_mutation=mutation, clear_route_cache=True)
        if body is not None:
            held = [_Part(body, held[-1].is_last)]
            if self._pending == "request_body":
                chosen.body_mutation.CopyFrom(BodyMutation(body=body))
        metadata = Struct()
        metadata.get_or_create_struct(LB_NAMESPACE)[ENDPOINT] = endpoint
        if self._pending == "request_body":
            yield ProcessingResponse(request_body=BodyResponse(response=chosen), dynamic_metadata=metadata)
            return
        yield ProcessingResponse(request_headers=HeadersResponse(response=chosen), dynamic_metadata=metadata)
        for part in held:
            yield from (ProcessingResponse(request_body=one) for one in _returned(part))
        if self._has_trailers:
            yield ProcessingResponse(request_trailers=TrailersResponse())

    def refuse(self, status: int, message: str, headers: Mapping[str, str] = RETRY_AFTER) -> ProcessingResponse:
        """The answer that refuses the request; the data plane sends it to the client."""
        self.is_waiting, self.is_over = False, True
        self._held = []
        shown = {"content-type": "application/json", **headers}
        return ProcessingResponse(
            immediate_response=ImmediateResponse(
                status=HttpStatus(code=StatusCode.ValueType(status)),
                headers=HeaderMutation(set_headers=[_header(*one) for one in shown.items()]),
                body=error_body(status, message),
                details=f"lmkv picker: {message}",
            )
        )

    def _request_headers(self, message: HttpHeaders, metadata: Metadata) -> Iterator[ProcessingResponse]:
        if self._is_picked:  # headers are sent once; the choice stays
            yield ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))
            return
        self.headers = _headers(message.headers)
        self.path = self.headers.get(":path", "").partition("?")[0]
        if SUBSET_NAMESPACE in metadata.filter_metadata:
            self.subset = _endpoints(metadata.filter_metadata[SUBSET_NAMESPACE])
        if message.end_of_stream or self._request_mode not in (BUFFERED, FULL_DUPLEX_STREAMED):
            self.is_waiting = True
        elif self._request_mode == BUFFERED:
            self._pending = "request_body"
            yield ProcessingResponse(request_headers=HeadersResponse(response=CommonResponse()))

    def _request_body(self, message: HttpBody) -> Iterator[ProcessingResponse]:
        part = _Part(message.body, message.end_of_stream)
        if self._is_picked:
            if self._request_mode == FULL_DUPLEX_STREAMED:
                yield from (ProcessingResponse(request_body=one) for one in _returned(part))
            else:
                yield ProcessingResponse(request_body=BodyResponse(response=CommonResponse()))
            return
        self._held.append(part)
        self._held_bytes += len(part.body)
        is_complete = part.is_last or self._request_mode == BUFFERED
        self.is_waiting = is_complete or self.is_too_large
        if not self.is_too_large:
            self._on_part(part.body, is_last=is_complete)


def _returned(part: _Part) -> Iterator[BodyResponse]:
    """A part of a body, unchanged, in pieces of at most `MAX_PART_BYTES`."""
    body, begin = part.body, 0
    while True:
        end = begin + MAX_PART_BYTES
        is_last = end >= len(body)
        piece = StreamedBodyResponse(body=body[begin:end], end_of_stream=part.is_last and is_last)
        yield BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))
        if is_last:
            return
        begin = end


def _header(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _headers(message: HeaderMap) -> dict[str, str]:
    return {one.key.lower(): one.raw_value.decode("latin-1") or one.value for one in message.headers}


def _text(metadata: Struct, key: str) -> str:
    value = metadata.fields.get(key)
    return value.string_value if value is not None else ""


def _endpoints(metadata: Struct) -> frozenset[str] | None:
    """The endpoints of a subset hint: a list, or text with commas; None if the key is missing."""
    value = metadata.fields.get(SUBSET)
    if value is None:
        return None
    content: ListValue = value.list_value
    texts = [one.string_value for one in content.values] if content.values else value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())
