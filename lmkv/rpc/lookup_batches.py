"""Messages of `LookupStream`, for clients and nodes: lookups that wait while a message is sent go into the next one."""

from __future__ import annotations

import asyncio
from collections import deque

from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.v1.cache_service_pb2 import LookupRequest, LookupResponse, LookupStreamRequest

BATCH_BYTES = MAX_MESSAGE_BYTES // 2
"""Maximum size of a message of several lookups."""

Answer = asyncio.Future[LookupResponse]


def take_batch(waiting: deque[tuple[LookupRequest, Answer]], pending: deque[Answer]) -> LookupStreamRequest:
    """Moves lookups from `waiting` into a message, and their answers to `pending`, in order.

    Lookups whose answer is done are dropped: their caller was cancelled. The message may be empty.
    """
    message, size_bytes = LookupStreamRequest(), 0
    while waiting:
        request, answer = waiting[0]
        if message.requests and size_bytes + request.ByteSize() > BATCH_BYTES:
            break
        waiting.popleft()
        if not answer.done():
            message.requests.append(request)
            size_bytes += request.ByteSize()
            pending.append(answer)
    return message
