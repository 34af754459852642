"""Audits of the node's engines: wrong chunks are dropped everywhere, and a spec with too many of them is not served.

An engine computes some chunks again that the node holds (`docs/concepts/audit.md`), and reports how many, and which of
them were wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from lmkv.errors import Full, LmkvError
from lmkv.internal.v1 import report_service_pb2
from lmkv.keys import ChunkKey, join_keys, part_key, split_keys
from lmkv.kv_inputs import NO_INPUTS, KvInputs
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import UNKNOWN_ORIGIN, Chunk
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.sessions.session import EngineSession
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

logger = logging.getLogger(__name__)

LAST_AUDITS = 1000
"""Chunks of a spec that count, the last ones that were compared."""
MIN_WRONG = 3
"""Wrong chunks among these up to which a spec is served in any case."""
MAX_WRONG_SHARE = 0.01
"""Share of them up to which it is served."""
NAMED = ("model_id", "weight_version", "kv_dtype", "format", "tile_backend", "tile_isa", "block_size", "hash_scheme")
"""Fields of the spec in a record; the key of a chunk depends on all of them."""
VERSIONS = ("lmkv", "vllm", "torch")
"""Inputs of engines that are their versions."""
MAX_SHOWN_DIFFERENCES = 32
MAX_WATCHES = 4
"""Calls of `EngineService.Audit` at a time."""
MAX_WAITING_REPORTS = 1024
"""Comparisons that wait for one such call to read them."""
RETRY_SECONDS = 5.0


class CircuitBreaker:
    """Opens, for good, when too many of the last compared chunks were wrong."""

    def __init__(self) -> None:
        self._were_wrong: deque[bool] = deque(maxlen=LAST_AUDITS)
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether too many were wrong."""
        return self._is_open

    def add(self, audited_count: int, wrong_count: int) -> bool:
        """Adds compared chunks; returns whether that opens it."""
        self._were_wrong.extend([False] * min(max(0, audited_count - wrong_count), LAST_AUDITS) + [True] * wrong_count)
        wrong = sum(self._were_wrong)
        opens = not self._is_open and wrong >= MIN_WRONG and wrong > MAX_WRONG_SHARE * len(self._were_wrong)
        self._is_open |= opens
        return opens


class AuditRecord:
    """The record of a wrong chunk: what is known of it, of the engine that has computed it again, and of the writer."""

    def __init__(self, session: EngineSession, audited: pb.AuditedChunks, held: Chunk | None) -> None:
        self._session = session
        self._audited = audited
        self._origin = held.origin if held else UNKNOWN_ORIGIN
        self._age = f"in the pool for {time.monotonic() - held.arrived_at:.3g} s" if held else "no longer in the pool"

    def text(self, writers: Sequence[KvInputs]) -> str:
        """The record as one line; `writers` may have stored the chunk, if it is not known who has."""
        chunk, spec = self._audited.chunk, self._session.spec
        reader = next(iter(self._session.origin.writers), NO_INPUTS)
        known = self._origin.writers or writers
        errors = ", ".join(f"{layer.layer}: {layer.mean:.2g}, {layer.most:.2g}" for layer in chunk.layers)
        sentences = [
            f"[{chunk.engine_request_id}] chunk {chunk.chunk_key.hex()} is wrong: computed twice, it differs from what "
            f"the cache holds. It and those behind it are dropped everywhere",
            f"Part {chunk.part}, tokens {chunk.first_token} to {chunk.first_token + chunk.token_count - 1}, "
            f"tier {chunk.tier}, {self._source()}, {self._age}",
            f"Mean and largest error of layers: {errors}",
            f"Engine that computed it: {_versions(reader)}",
            f"Engine that stored it: {' or '.join(_versions(one) for one in known) or 'not known'}",
            f"Its key names {', '.join(f'{name} {spec.shown(name)}' for name in NAMED)}; "
            f"adapter {chunk.lora_identity or 'none'}; {'media' if chunk.has_media else 'no media'}; and, in its "
            f"model_id, {', '.join(sorted(reader.named)) or 'inputs that are not known'}",
            f"Inputs that it does not name and in which both engines differ: {self._differences(reader, known)}",
        ]
        return ". ".join(sentences)

    def _source(self) -> str:
        origin = self._origin
        if origin.peer_id:
            return f"read from instance {origin.peer_id} by channel {origin.channel}"
        return f"read from {origin.tier}" if origin.tier else "stored by an engine of this node"

    @staticmethod
    def _differences(reader: KvInputs, writers: Sequence[KvInputs]) -> str:
        if not reader or not writers:
            return "not known"
        found = [f"{name} {there}, here {here}" for one in writers for name, (there, here) in shown_first(reader, one)]
        return "; ".join(found[:MAX_SHOWN_DIFFERENCES]) or "none"


def shown_first(reader: KvInputs, writer: KvInputs) -> list[tuple[str, tuple[str, str]]]:
    """The inputs in which a reader differs from a writer, those of the configuration first."""
    return sorted(reader.differences(writer).items(), key=lambda item: ("." not in item[0], item[0]))


def _versions(inputs: KvInputs) -> str:
    return ", ".join(f"{name} {inputs.others[name]}" for name in VERSIONS if name in inputs.others) or "not known"


class AuditWatch:
    """What one call of `EngineService.Audit` is still to report."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[pb.AuditResponse] = asyncio.Queue(MAX_WAITING_REPORTS)


class Audits:
    """The results of audits, and what follows from them. One event loop owns it."""

    def __init__(self, stack: TierStack, orders: OrderRunner, fleet: FleetMembership, sessions: EngineSessions) -> None:
        self._stack = stack
        self._orders = orders
        self._fleet = fleet
        self._sessions = sessions
        self._breakers: dict[bytes, CircuitBreaker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: set[AuditWatch] = set()
        self._wrong_count = 0
        self.stopped: dict[bytes, str] = {}
        """The model names of the specs that are not served any more, by fingerprint."""

    @property
    def wrong_count(self) -> int:
        """Chunks that were wrong, without those behind them."""
        return self._wrong_count

    @property
    def is_watched(self) -> bool:
        """Whether a call watches the audits of this node."""
        return bool(self._watches)

    @contextmanager
    def watched(self) -> Iterator[AuditWatch]:
        """Collects what is compared from now on. Raises `Full` if as many watch as may."""
        if len(self._watches) >= MAX_WATCHES:
            raise Full(f"{MAX_WATCHES} calls watch the audits of this node", retry_seconds=RETRY_SECONDS)
        watch = AuditWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def note(self, session: EngineSession, audited: pb.AuditedChunks) -> None:
        """Notes compared chunks of an engine. Raises `BadChunkKey`."""
        spec, wrong_keys, record = session.spec, split_keys(audited.wrong_keys), ""
        wrong_count = int(bool(wrong_keys))
        self._wrong_count += wrong_count
        if wrong_keys:
            record = self._record(session, audited)
            logger.error("%s", record)
            keys = [part_key(key, part) for key in wrong_keys for part in range(len(spec.parts))]
            self._begin(keys)
            if not self._fleet.report_wrong(wrong_keys) and self._fleet.is_configured:
                logger.error("no coordinator is connected: other instances keep the wrong chunks")
        for watch in self._watches:
            with suppress(asyncio.QueueFull):
                watch.reports.put_nowait(pb.AuditResponse(audited=audited, record=record))
        if audited.outcome != pb.AUDIT_OUTCOME_VOID and not audited.chunk.is_requested:
            self._count(spec, audited.chunk_count, wrong_count)

    def _record(self, session: EngineSession, audited: pb.AuditedChunks) -> str:
        if not audited.HasField("chunk"):
            return f"an engine of {session.spec.model_name} has found a wrong chunk"
        key = part_key(ChunkKey(audited.chunk.chunk_key), audited.chunk.part)
        writers = self._sessions.writers(session.spec.fingerprint)
        return AuditRecord(session, audited, self._stack.tier.get(key)).text(writers)

    def _count(self, spec: KvSpec, audited_count: int, wrong_count: int) -> None:
        if self._breakers.setdefault(spec.fingerprint, CircuitBreaker()).add(audited_count, wrong_count):
            self.stopped[spec.fingerprint] = spec.model_name
            self._stack.stop(spec.fingerprint)
            logger.critical(
                "nothing of %s is stored or found here any more, until this node is started again: audits have found "
                "too many wrong chunks (docs/concepts/audit.md)",
                spec.model_name,
            )

    async def aclose(self) -> None:
        """Ends what still runs. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, keys: Sequence[ChunkKey]) -> None:
        task = asyncio.create_task(self._drop(keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, keys: Sequence[ChunkKey]) -> None:
        order = report_service_pb2.DropOrder(chunk_keys=join_keys(keys), wrong=True)
        try:
            logger.error("an audit has found a wrong chunk; %d chunks are dropped", await self._orders.drop(order))
        except LmkvError as error:
            logger.error("cannot drop wrong chunks: %s", error)
