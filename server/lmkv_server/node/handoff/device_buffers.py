"""The device buffers that engines have lent to this node, and which of them a handoff may use."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmkv.errors import BadMessage
from lmkv.spec import KvSpec
from lmkv.units import format_bytes
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.device_buffer import BufferWorker, DeviceBuffer
from lmkv_server.node.sessions.sessions import EngineSessions

logger = logging.getLogger(__name__)


class DeviceBuffers:
    """The buffers of one node, by engine."""

    def __init__(
        self, engines: EngineSessions, size_bytes: int, *, verify: bool, on_close: Callable[[HostTier], None]
    ) -> None:
        """`size_bytes` is the most that an engine may lend; `on_close` is called with the tier of a closed buffer."""
        self.size_bytes = size_bytes
        self._engines = engines
        self._verify = verify
        self._on_close = on_close
        self._buffers: dict[str, DeviceBuffer] = {}

    @property
    def lent_bytes(self) -> int:
        """Bytes that handoffs may use now."""
        return sum(buffer.size_bytes for buffer in self._buffers.values() if buffer.is_complete)

    @property
    def used_bytes(self) -> int:
        """Bytes of these that are reserved or hold chunks."""
        return sum(buffer.tier.used_bytes for buffer in self._buffers.values() if buffer.is_complete)

    def lend(self, part: pb.BufferPart) -> BufferWorker:
        """Adds a worker's part. Raises `EngineNotFound`, or `BadMessage` if the part is not valid."""
        session = self._engines.session(part.engine_id)
        if not 0 < part.buffer_size_bytes <= self.size_bytes:
            raise BadMessage(
                f"a device buffer of {part.buffer_size_bytes} bytes was offered, and the node uses one of "
                f"{self.size_bytes}; 0: it takes no handoffs, or all into its pool",
                field="buffer_size_bytes",
            )
        if part.engine_id not in self._buffers:
            self._buffers[part.engine_id] = DeviceBuffer(
                session.worker_count, part.buffer_size_bytes, verify=self._verify
            )
        buffer = self._buffers[part.engine_id]
        worker = buffer.lend(part.rank, part.buffer_size_bytes)
        if buffer.is_complete:
            logger.info(
                "engine %s has lent a device buffer of %s for handoffs", part.engine_id, format_bytes(buffer.size_bytes)
            )
        return worker

    def find(self, spec: KvSpec) -> DeviceBuffer | None:
        """The buffer for prompts of this spec.

        None if several engines have the spec: the engine that the prompt's request will be sent to is not known yet.
        """
        sessions = self._engines.attached(spec.fingerprint)
        buffer = self._buffers.get(sessions[0].engine_id) if len(sessions) == 1 else None
        return buffer if buffer and buffer.is_complete else None

    def tier_of(self, engine_id: str) -> HostTier | None:
        """The tier of the engine's buffer, if it has lent one."""
        buffer = self._buffers.get(engine_id)
        return buffer.tier if buffer else None

    def with_tier(self, tier: HostTier) -> DeviceBuffer | None:
        """The buffer that has this tier; None: it is the node's own."""
        return next((buffer for buffer in self._buffers.values() if buffer.tier is tier), None)

    def close(self, buffer: DeviceBuffer) -> None:
        """Closes a buffer: one of its workers has disconnected. Idempotent."""
        if not buffer.closed:
            buffer.close()
            self._on_close(buffer.tier)

    def remove(self, engine_id: str) -> None:
        """Closes and removes the buffer of an engine that has detached. Idempotent."""
        if buffer := self._buffers.get(engine_id):
            self.close(buffer)
            del self._buffers[engine_id]
