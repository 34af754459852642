"""A gateway for tests: a gRPC client that is made from Envoy's published protos, not from ours.

`ext_proc.binpb` has the descriptors of `envoy/service/ext_proc/v3/external_processor.proto` and of what it imports, as
PyPI's `xds-protos` 1.85.0 ships them (Apache-2.0). They have a pool of their own: ours declares the same names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)

PACKAGE = "envoy.service.ext_proc.v3"
METHOD = f"/{PACKAGE}.ExternalProcessor/Process"
WELL_KNOWN = (any_pb2, descriptor_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for module in WELL_KNOWN:
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("ext_proc.binpb").read_bytes())
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _pool()
Request: Any = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.ProcessingRequest"))
Response: Any = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.ProcessingResponse"))
OVERWRITE = (
    POOL.FindEnumTypeByName("envoy.config.core.v3.HeaderValueOption.HeaderAppendAction")
    .values_by_name["OVERWRITE_IF_EXISTS_OR_ADD"]
    .number
)
MODES = POOL.FindEnumTypeByName("envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode").values_by_name


class HttpExchange:
    """One HTTP request as a gateway processes it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **fields: Any) -> None:
        """Sends one phase."""
        await self.call.write(Request(**fields))

    async def answer(self) -> Any:
        """The next answer."""
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF, "the picker ended the stream"  # type: ignore[attr-defined]
        return answer

    async def send_headers(
        self,
        path: str = "/v1/completions",
        *,
        mode: str = "FULL_DUPLEX_STREAMED",
        response_mode: str = "FULL_DUPLEX_STREAMED",
        subset: Sequence[str] | str | None = None,
        end: bool = False,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        """The request's headers. Without `mode` the modes are not sent."""
        all_headers = {":method": "POST", ":path": path, "content-type": "application/json"} | dict(headers or {})
        shown = {"headers": [{"key": key, "raw_value": value.encode()} for key, value in all_headers.items()]}
        if mode:
            fields["protocol_config"] = {
                "request_body_mode": MODES[mode].number,
                "response_body_mode": MODES[response_mode].number,
            }
        request = Request(request_headers={"headers": shown, "end_of_stream": end}, **fields)
        if subset is not None:
            hint = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint["x-gateway-destination-endpoint-subset"] = subset if isinstance(subset, str) else list(subset)
        await self.call.write(request)

    async def pick(self, body: bytes, parts: int = 1, **options: Any) -> Any:
        """Sends a request as a gateway of the inference extension does. Returns the answer to its headers."""
        await self.send_headers(**options)
        for part in split(body, parts):
            await self.send(request_body={"body": part})
        await self.send(request_body={"body": b"", "end_of_stream": True})
        return await self.answer()

    async def body(self) -> bytes:
        """The request's body, as it is returned to the gateway."""
        whole = bytearray()
        while True:
            answer = await self.answer()
            part = answer.request_body.response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            whole += part.body
            if part.end_of_stream:
                return bytes(whole)


def split(body: bytes, parts: int) -> list[bytes]:
    """The body in equal parts."""
    step = max(1, -(-len(body) // parts))
    return [body[begin : begin + step] for begin in range(0, len(body), step)]


def endpoint_of(answer: Any) -> str:
    """The endpoint of an answer: equal in header and metadata, whatever header the client has sent."""
    phase = answer.WhichOneof("response")
    assert phase in ("request_headers", "request_body"), answer
    response = getattr(answer, phase).response
    (option,) = response.header_mutation.set_headers
    assert option.header.key == "x-gateway-destination-endpoint"
    assert option.append_action == OVERWRITE, "the data plane would keep a header of the client"
    assert response.clear_route_cache
    endpoint = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == endpoint
    return str(endpoint)


class Gateway:
    """A gateway that is connected to a picker."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._metadata = tuple(metadata)
        self._process: Any = channel.stream_stream(
            METHOD,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=Response.FromString,
        )

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[HttpExchange]:
        """A stream, which ends with the block."""
        call: Any = self._process(metadata=self._metadata, timeout=60)
        try:
            yield HttpExchange(call)
        finally:
            call.cancel()

    async def pick(self, body: bytes, **options: Any) -> str:
        """The endpoint of one request."""
        async with self.exchange() as exchange:
            return endpoint_of(await exchange.pick(body, **options))
