"""The engine's connection to its node: one thread with one event loop; the scheduler side only appends and pops."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import deque
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import grpc

from lmkv import rpc
from lmkv.attach_order import can_merge
from lmkv.config import ConnectorConfig, as_written
from lmkv.errors import ConfigConflict, ConfigError, LmkvError, Unreachable
from lmkv.spec import KvSpec
from lmkv.units import format_bytes, format_duration, format_rate
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_client.connector.messages import Attachment
from lmkv_client.connector.node.launcher import NodeLauncher
from lmkv_client.connector.served_names import ServedNames
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.plugin import PROCESSORS

logger = init_logger("vllm.lmkv")

CONNECT_TIMEOUT_SECONDS = 2.0
FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 1.0
MAX_UNSENT = 4096
"""Most messages that wait for a node that does not read; with more of them the node counts as lost."""


class NodeLost:
    """Event: the connection to the node is lost, and with it everything that it had granted."""


Event = Attachment | NodeLost | pb.AttachResponse


class NodeClient:
    """Keeps the engine attached to its node: finds or starts it, and does so again whenever it is lost.

    `inbox` is filled by the client's thread and emptied by the scheduler side: both are atomic on a deque.
    """

    def __init__(
        self, config: ConnectorConfig, spec: KvSpec, worker_count: int, served: ServedNames | None = None
    ) -> None:
        """`served` are the names that the node registers for this engine, as they are at each attachment."""
        self.served = served or ServedNames()
        self.inbox: deque[Event] = deque()
        self._config = config
        self._spec = spec
        self._worker_count = worker_count
        self._launcher = NodeLauncher(config)
        self._engine = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._attach_count = 0
        self._outboxes: dict[str, deque[pb.AttachRequest]] = {}
        """Messages to send, by the engine id of the attachment; only the current attachment has an entry."""
        self._filled = asyncio.Event()
        self._wake_pending = False
        self._loop = asyncio.new_event_loop()
        self._attached_once = threading.Event()
        self._config_error: LmkvError | None = None
        self._closing = False
        self._attached = False
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="lmkv-node-client", daemon=True)

    def start(self) -> None:
        """Starts the thread and waits, up to `node_start_timeout`, until the engine is attached.

        Raises `ConfigError` if the node cannot start as configured. A node that is not available yet is not an error:
        the engine computes until it is.
        """
        self._thread.start()
        if not self._attached_once.wait(self._config.node_start_timeout):
            logger.warning(
                "no node after %.0f s; computing everything until one is available", self._config.node_start_timeout
            )
            self._attached_once.set()  # no caller waits any more: from now on mistakes are logged
        if self._config_error:
            raise self._config_error

    def send(self, attachment: Attachment, message: pb.AttachRequest) -> None:
        """Queues a message; messages are sent in order, and merged. Called on the scheduler's thread; never blocks.

        Drops the message if the attachment has ended: its offsets and lookup ids are not valid for the next one.
        """
        outbox = self._outboxes.get(attachment.engine_id)
        if outbox is None:
            return
        outbox.append(message)
        if len(outbox) > MAX_UNSENT:
            self._fail_overflow()
        elif not self._wake_pending:
            self._wake_pending = True
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Closes the connection. A node that this client started stays for `node_linger`: the engine may restart."""
        self._closing = True
        if self._thread.is_alive():
            with suppress(RuntimeError):  # the thread ends by itself after a mistake, and closes its loop
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(CONNECT_TIMEOUT_SECONDS)

    def _fail_overflow(self) -> None:
        """Treats a node that does not read as lost, and drops the messages that wait for it."""
        self._outboxes = {}
        if call := self._call:
            with suppress(RuntimeError):  # closed
                self._loop.call_soon_threadsafe(call.cancel)

    def _wake(self) -> None:
        self._wake_pending = False
        self._filled.set()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, PROCESSORS)  # this thread only: vLLM has pinned the one that started it
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._keep_attached())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _keep_attached(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._closing:
            try:
                address = await self._launcher.address()
                await self._attach(address)
            except ConfigError as error:
                if not self._attached_once.is_set():
                    self._config_error = error
                    self._attached_once.set()
                    return
                logger.error("cannot attach to a node: %s", error)
            except LmkvError as error:
                logger.debug("node not reachable: %s", error)
            except Exception:  # the engine must be attached again, whatever the error is
                logger.exception("the connection to the node failed unexpectedly")
            if self._attached:
                self._attached = False
                self._outboxes = {}
                self.inbox.append(NodeLost())
                backoff = FIRST_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _attach(self, address: str) -> None:
        """Attaches and relays messages until the stream ends. Raises the node's error, or `Unreachable`."""
        self._attach_count += 1
        engine_id = f"{self._engine}-{self._attach_count}"
        hello = pb.Hello(
            engine_id=engine_id,
            spec=self._spec.to_proto(),
            worker_count=self._worker_count,
            expected_config=self._launcher.expected_config,
            served_models=self.served.messages,
        )
        async with rpc.open_channel(address) as channel:
            call: Any = engine_service_pb2_grpc.EngineServiceStub(channel).Attach()  # type: ignore[call-arg]
            self._call = call
            sender = None
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    await call.write(pb.AttachRequest(hello=hello))
                    answer = await call.read()
                if not isinstance(answer, pb.AttachResponse):
                    raise await self._end_error(call)
                self._welcome(address, engine_id, answer)
                sender = asyncio.create_task(self._send_all(call, self._outboxes[engine_id]))
                while isinstance(message := await call.read(), pb.AttachResponse):
                    self.inbox.append(message)
                    for handed in message.handed:
                        log_handoff(handed)
                raise await self._end_error(call)
            except TimeoutError:
                raise Unreachable(f"node at {address} does not answer") from None
            except asyncio.CancelledError:  # gRPC raises this too when we have cancelled the call
                if self._closing:
                    raise
                raise Unreachable(f"node at {address} does not read") from None
            except grpc.RpcError as error:
                raise self._translate(rpc.from_rpc_error(error)) from None
            finally:
                self._call = None
                call.cancel()
                if sender:
                    sender.cancel()
                    await asyncio.gather(sender, return_exceptions=True)  # its error is the one that is raised here

    def _welcome(self, address: str, engine_id: str, answer: pb.AttachResponse) -> None:
        welcome = answer.welcome
        self._outboxes = {engine_id: deque()}
        self._attached = True
        attachment = Attachment(
            engine_id=engine_id,
            pool_socket=welcome.pool_socket,
            epoch=welcome.epoch,
            node_address=address,
            device_buffer_bytes=welcome.device_buffer_bytes,
        )
        self.inbox.append(attachment)
        self.inbox.append(answer)
        logger.info(
            "attached to node %s (pid %d), pool %s",
            welcome.instance_id,
            welcome.node_pid,
            format_bytes(welcome.pool_size_bytes),
        )
        self._attached_once.set()

    async def _end_error(self, call: Any) -> LmkvError:
        """Why the node ended the stream."""
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return Unreachable("the node ended the stream")
        try:
            await call.read()
        except grpc.RpcError as error:
            return self._translate(rpc.from_rpc_error(error))
        return Unreachable(f"{code.name}: {await call.details()}")

    def _translate(self, error: LmkvError) -> LmkvError:
        """The error to raise: a conflict with a running node is a `ConfigError`, unless that node ends now."""
        if isinstance(error, ConfigConflict) and not self._launcher.replaces(error):
            return ConfigError(as_written(str(error), self._config.written))
        if error.code == "INVALID_ARGUMENT":
            return ConfigError(str(error))
        return error

    async def _send_all(self, call: Any, outbox: deque[pb.AttachRequest]) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while outbox:
                await call.write(next_message(outbox))


def next_message(outbox: deque[pb.AttachRequest]) -> pb.AttachRequest:
    """Removes messages from the outbox and merges them, as many as one message can carry with the same effect."""
    message = outbox.popleft()
    size = message.ByteSize()
    while outbox and size + (more := outbox[0]).ByteSize() < rpc.MAX_MESSAGE_BYTES // 2:
        if not can_merge(message, more):
            break
        size += more.ByteSize()
        reserve_count = message.reserve_count + more.reserve_count
        pairs = zip_longest(message.part_reserve_counts, more.part_reserve_counts, fillvalue=0)
        part_counts = [one + other for one, other in pairs]
        message.MergeFrom(outbox.popleft())
        message.reserve_count = reserve_count
        message.part_reserve_counts[:] = part_counts
    return message


def log_handoff(handed: pb.HandedChunks) -> None:
    """Logs a handoff when it has ended; an idle engine would do so only with its next request."""
    if handed.status.code:
        logger.warning("handoff %s failed: %s", handed.request_id, handed.status.message)
    seconds = handed.transfer_duration.ToNanoseconds() / 1e9
    logger.info(
        "Handoff %s: %d chunks sent, %s, %s, %s",
        handed.request_id,
        handed.chunk_count,
        format_bytes(handed.transferred_bytes),
        format_duration(seconds),
        format_rate(handed.transferred_bytes, seconds),
    )
