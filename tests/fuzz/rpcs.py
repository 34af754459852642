"""Calls the handlers of RPCs with the bytes of requests, as the gRPC servers do, without a server."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from lmkv.errors import LmkvError
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.rpc.requests import Requests, checked
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv_server.coordinator.http.bodies import CallAborted
from lmkv_server.coordinator.http.gateway import HttpContext
from tests.fuzz.promises import check_status
from tests.support.promised_errors import promises

MAX_RESPONSES = 8
"""Responses that are read of a stream, which may be endless."""
PEER = "ipv4:10.0.0.1:1"


def methods_of(services: Sequence[str], *, without: Sequence[str] = ()) -> list[MethodDescriptor]:
    """The RPCs of services, in the order of their protos."""
    found = [method for name in services for method in Default().FindServiceByName(name).methods]
    return [method for method in found if method.name not in without]


async def call(
    servicers: Mapping[str, Any], method: MethodDescriptor, requests: Sequence[bytes]
) -> list[Message] | LmkvError:
    """The responses, or the error, which must be one that the proto promises."""
    handler = getattr(servicers[method.containing_service.full_name], method.name)
    decode = GetMessageClass(method.input_type).FromString
    context = HttpContext(60.0, PEER)
    try:
        if method.client_streaming:
            responses = await _read(handler(Requests(_each(requests), decode, Lease(of_process(), PEER)), context))
        elif method.server_streaming:
            responses = await _read(handler(checked(requests[0], decode), context))
        else:
            responses = [await handler(checked(requests[0], decode), context)]
    except LmkvError as error:
        check_status(error)
        assert (error.code, error.reason) in _promised(method.full_name), f"{method.name}: {error!r}"
        return error
    except CallAborted as aborted:
        raise AssertionError(f"{method.name} ended without a reason: {aborted}") from None
    finally:
        context.finish()
    for response in responses:
        assert len(response.SerializeToString()) <= MAX_MESSAGE_BYTES, "a response beyond the message limit"
    return responses


@functools.cache
def _promised(full_name: str) -> set[tuple[str, str]]:
    common = {("INVALID_ARGUMENT", "BAD_MESSAGE")}  # of a message that cannot be decoded
    return promises(Default().FindMethodByName(full_name)) | common


async def _each(requests: Sequence[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def _read(responses: Any) -> list[Message]:
    found: list[Message] = []
    async with aclosing(responses):
        async for response in responses:
            found.append(response)
            if len(found) == MAX_RESPONSES:
                break
    return found
