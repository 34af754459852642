"""An `ext_proc` server that picks without reading the body: what messages cost, beside the endpoint picker's choice."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from lmkv import rpc
from lmkv.ext_proc.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from lmkv.ext_proc.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from lmkv.runtime.signals import stop_on_signals
from lmkv_server.proxy.picker.exchange import Exchange
from lmkv_server.proxy.picker.service import SERVICE

MAX_BODY_BYTES = 32 << 20
ENDPOINT = "192.0.2.1:8000"
"""What it picks: an address of documentation."""


class NullPicker(ExternalProcessorServicer):
    """Keeps the body's parts until the last one has arrived, as the picker does."""

    async def Process(  # noqa: N802  # its name in the proto
        self, request_iterator: AsyncIterator[ProcessingRequest], _context: Any
    ) -> AsyncIterator[ProcessingResponse]:
        exchange = Exchange(MAX_BODY_BYTES, _ignore)
        async for message in request_iterator:
            for response in exchange.receive(message):
                yield response
            if exchange.is_waiting:
                for response in exchange.pick(ENDPOINT):
                    yield response


def _ignore(part: bytes, *, is_last: bool) -> None: ...


async def serve(port: int) -> None:
    """Serves until it receives a stop signal."""
    stop = stop_on_signals()
    server = await rpc.make_server([SERVICE], max_message_bytes=2 * MAX_BODY_BYTES)
    add_ExternalProcessorServicer_to_server(NullPicker(), server)
    rpc.add_port(server, f"127.0.0.1:{port}")
    await server.start()
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
