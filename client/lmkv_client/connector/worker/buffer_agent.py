"""Lends the node one rank's part of the device buffer and carries out its reads. Used by the worker side."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import grpc

from lmkv import rpc
from lmkv.errors import LmkvError, Unreachable
from lmkv.transfer.nixl.channel import NixlChannel
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.connector.worker.buffer_reads import BufferReads
from lmkv_client.connector.worker.device_buffer_part import DeviceBufferPart
from lmkv_client.engine.attachment import Attachment
from lmkv_client.processors import use_processors
from lmkv_kernels import Pages

logger = init_logger("vllm.lmkv")

CLOSE_SECONDS = 5.0


class BufferAgent:
    """A thread with an event loop, from an attachment until `close` or the end of the node.

    The node decides what is read. A failure fails a read at the node and nothing else; without the buffer, handoffs go
    through the node's pool.
    """

    def __init__(
        self,
        attachment: Attachment,
        rank: int,
        pages: Pages,
        *,
        sums: bool = True,
        nixl_backends: tuple[str, ...] = ("UCX",),
    ) -> None:
        """`sums` is false for a rank whose heads another one sums."""
        self.buffer: DeviceBufferPart | None = None
        """The part, once it can be read into. Its memory stays valid after the end, for planned loads."""
        self._attachment = attachment
        self._rank = rank
        self._pages = pages
        self._sums = sums
        self._nixl_backends = nixl_backends
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lmkv-lend", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the stream: nothing is read into the part any more. Idempotent."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CLOSE_SECONDS)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        use_processors()
        asyncio.set_event_loop(self._loop)
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._lend())
        except (LmkvError, ValueError, RuntimeError) as error:
            logger.warning("handoffs go through the node's pool, not to the device: %s", error)
        except Exception:
            logger.exception("lending the device buffer failed unexpectedly")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _lend(self) -> None:
        """Runs until the stream ends, and raises why."""
        buffer = DeviceBufferPart(self._pages, self._attachment.device_buffer_bytes)
        name = f"{self._attachment.engine_id}/{self._rank}"
        nixl = await asyncio.to_thread(NixlChannel, name, buffer.region, self._nixl_backends, buffer.prepare_thread)
        self.buffer = buffer
        try:
            async with rpc.open_channel(self._attachment.node_address) as channel:
                await self._serve(channel, nixl, buffer)
        finally:
            await nixl.aclose()

    async def _serve(self, channel: grpc.aio.Channel, nixl: NixlChannel, buffer: DeviceBufferPart) -> None:
        results: asyncio.Queue[pb.BufferReadResult] = asyncio.Queue()  # bounded by the node's reads
        reads = BufferReads(nixl, buffer, results.put_nowait, sums=self._sums)
        call: Any = engine_service_pb2_grpc.EngineServiceStub(channel).Lend()  # type: ignore[call-arg]
        part = pb.BufferPart(
            engine_id=self._attachment.engine_id, rank=self._rank, buffer_size_bytes=buffer.buffer_size_bytes
        )
        tasks = {asyncio.create_task(send_results(call, results))}
        try:
            await call.write(pb.LendRequest(part=part))
            while isinstance(message := await call.read(), pb.LendResponse):
                for order in message.reads:
                    task = asyncio.create_task(reads.execute(order))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            raise Unreachable(f"the node does not accept the device buffer any more: {(await call.code()).name}")
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        except asyncio.InvalidStateError:
            raise Unreachable("the node has ended the stream") from None
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reads.close()


async def send_results(call: Any, results: asyncio.Queue[pb.BufferReadResult]) -> None:
    """Sends the results of reads to the node, in order."""
    while True:
        await call.write(pb.LendRequest(results=[await results.get()]))
