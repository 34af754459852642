"""The device buffers that engines have lent to a node, and which of them a handoff may use. For `Receiver`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmkv.errors import BadMessage
from lmkv.spec import KvSpec
from lmkv.units import format_bytes
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.device_buffer import DeviceBuffer, Part
from lmkv_server.node.sessions.sessions import Engines

logger = logging.getLogger(__name__)


class DeviceBuffers:
    """Those of one node, by engine. `on_lost` is told the tier of one whose engine, or a worker of it, is gone."""

    def __init__(self, engines: Engines, size_bytes: int, *, verify: bool, on_lost: Callable[[HostTier], None]) -> None:
        """`size_bytes` is what engines shall lend; 0: nothing."""
        self.size_bytes = size_bytes
        self._engines = engines
        self._verify = verify
        self._on_lost = on_lost
        self._buffers: dict[str, DeviceBuffer] = {}

    @property
    def lent_bytes(self) -> int:
        """Bytes that handoffs may use now."""
        return sum(buffer.size_bytes for buffer in self._buffers.values() if buffer.is_whole)

    @property
    def used_bytes(self) -> int:
        """Bytes of these that chunks take, or room for them."""
        return sum(buffer.tier.used_bytes for buffer in self._buffers.values() if buffer.is_whole)

    def lend(self, part: pb.BufferPart) -> Part:
        """Takes a worker's part. Raises `EngineNotFound`, or `BadMessage` if there can be no such part."""
        session = self._engines.session(part.engine_id)
        if not 0 < part.buffer_size_bytes <= self.size_bytes:
            raise BadMessage(
                f"a device buffer of {part.buffer_size_bytes} bytes was offered, and the node uses one of "
                f"{self.size_bytes}; 0: it takes no handoffs",
                field="buffer_size_bytes",
            )
        if part.engine_id not in self._buffers:
            self._buffers[part.engine_id] = DeviceBuffer(
                session.worker_count, part.buffer_size_bytes, verify=self._verify
            )
        buffer = self._buffers[part.engine_id]
        lent = buffer.lend(part.rank, part.buffer_size_bytes)
        if buffer.is_whole:
            logger.info(
                "engine %s has lent a device buffer of %s for prompts that are handed to it",
                part.engine_id,
                format_bytes(buffer.size_bytes),
            )
        return lent

    def of(self, spec: KvSpec) -> DeviceBuffer | None:
        """The buffer that prompts of this spec may go to.

        None if several engines have the spec: nobody knows yet which of them the prompt's request will come to.
        """
        sessions = self._engines.attached(spec.fingerprint)
        buffer = self._buffers.get(sessions[0].engine_id) if len(sessions) == 1 else None
        return buffer if buffer and buffer.is_whole else None

    def tier_of(self, engine_id: str) -> HostTier | None:
        """The tier of the engine's buffer, if it has lent one."""
        buffer = self._buffers.get(engine_id)
        return buffer.tier if buffer else None

    def owning(self, tier: HostTier) -> DeviceBuffer | None:
        """The buffer whose tier this is."""
        return next((buffer for buffer in self._buffers.values() if buffer.tier is tier), None)

    def lost(self, buffer: DeviceBuffer) -> None:
        """One of its workers is gone. Idempotent."""
        if not buffer.closed:
            buffer.close()
            self._on_lost(buffer.tier)

    def forget(self, engine_id: str) -> None:
        """The engine is gone. Idempotent."""
        if buffer := self._buffers.get(engine_id):
            self.lost(buffer)
            del self._buffers[engine_id]
