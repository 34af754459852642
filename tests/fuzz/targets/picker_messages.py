"""Messages of a gateway to the endpoint picker: one choice for each request, and its body comes back unchanged."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from lmkv.ext_proc import external_processor_pb2 as pb
from lmkv_server.proxy.picker.exchange import LB_NAMESPACE, MAX_PART_BYTES, SERVED, SUBSET, SUBSET_NAMESPACE, Exchange
from tests.fuzz.inputs import Input, calls

COVERS = ("lmkv_server.proxy.picker.exchange",)
MAX_MESSAGES = 12
MAX_BODY_BYTES = 256
ENDPOINT = "10.0.0.1:8000"


def _metadata(namespace: str, key: str, value: str) -> pb.Metadata:
    struct = Struct()
    struct[key] = value
    return pb.Metadata(filter_metadata={namespace: struct})


def _messages(*messages: pb.ProcessingRequest) -> bytes:
    return calls(*((0, message.SerializeToString()) for message in messages))


_HEADERS = pb.HttpHeaders(
    headers=pb.HeaderMap(
        headers=[
            pb.HeaderValue(key=":path", raw_value=b"/v1/completions?x=1"),
            pb.HeaderValue(key="X-Session", raw_value=b"\xff"),
        ]
    )
)


def _body(content: bytes, *, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=content, end_of_stream=end))


def _begin(request_mode: pb.BodySendMode.ValueType) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(
        request_headers=_HEADERS,
        protocol_config=pb.ProtocolConfiguration(request_body_mode=request_mode, response_body_mode=request_mode),
        metadata_context=_metadata(SUBSET_NAMESPACE, SUBSET, "10.0.0.1:1, 10.0.0.2:1"),
    )


_END = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
SEEDS = [
    _messages(_begin(pb.FULL_DUPLEX_STREAMED), _body(b"{", end=False), _body(b"}")),
    _messages(_begin(pb.BUFFERED), _body(b"{}"), pb.ProcessingRequest(response_body=pb.HttpBody(end_of_stream=True))),
    _messages(_begin(pb.NONE), pb.ProcessingRequest(response_trailers=pb.HttpTrailers())),
    _messages(_begin(pb.FULL_DUPLEX_STREAMED), _body(b"x" * 200, end=False), _body(b"x" * 200, end=False)),
    _messages(
        _begin(pb.FULL_DUPLEX_STREAMED),
        _body(b"x", end=False),
        pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
        pb.ProcessingRequest(
            response_headers=pb.HttpHeaders(end_of_stream=True),
            metadata_context=_metadata(LB_NAMESPACE, SERVED, ENDPOINT),
        ),
    ),
    _messages(pb.ProcessingRequest(request_headers=_HEADERS, observability_mode=True)),
    _messages(_END, _END),  # the choice is made once
    calls((1, b""), (0, _begin(pb.FULL_DUPLEX_STREAMED).SerializeToString())),
]


def run(data: bytes) -> None:
    """A message with an odd number has the next choice refused."""
    taken: list[bytes] = []
    exchange, refuses = Exchange(MAX_BODY_BYTES, lambda part, **_: taken.append(part)), False
    sent, returned, choices, is_streamed = b"", b"", 0, True
    for number, encoded in Input(data).calls(MAX_MESSAGES):
        refuses |= bool(number & 1)
        try:
            message = pb.ProcessingRequest.FromString(encoded)
        except DecodeError:  # gRPC refuses it
            return
        is_observed = message.observability_mode or exchange._is_observed
        phase = message.WhichOneof("request")
        answers = list(exchange.receive(message))
        is_streamed &= exchange._request_mode == pb.FULL_DUPLEX_STREAMED
        if phase == "request_body" and not is_observed:
            sent += message.request_body.body
        if exchange.is_waiting:
            assert exchange.body is None or len(exchange.body) <= MAX_BODY_BYTES
            assert exchange.has_body == (exchange.body is not None)
            assert exchange.body in (None, b"".join(taken)), "the body was not read in the parts that it came in"
            choices += 1
            answers += [exchange.refuse(pb.ServiceUnavailable, "no")] if refuses else exchange.pick(ENDPOINT)
            assert not exchange.is_waiting
        assert not is_observed or not answers, "an observer is answered"
        for answer in answers:
            assert answer.WhichOneof("response")
            streamed = answer.request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= MAX_PART_BYTES
            returned += streamed.body
        assert exchange._held_bytes <= MAX_BODY_BYTES + len(encoded) or not exchange._held
        if exchange.is_over and refuses:
            return
        assert exchange.path == exchange.path.partition("?")[0]
        assert exchange.subset is None or all(text.strip() == text for text in exchange.subset)
    held = b"".join(part.body for part in exchange._held)
    assert not is_streamed or returned + held == sent, "parts of the body are lost or repeated"
    assert choices <= 1, f"{choices} choices for one request"
