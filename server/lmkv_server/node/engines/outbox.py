"""Answers to one engine until its stream sends them, and the tasks of its requests that wait for tiers or nodes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice

from lmkv import rpc
from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb

logger = logging.getLogger(__name__)

MAX_CHANGES = 65_536
"""Most chunks whose change is kept, as the proto says."""
MAX_KEYS = 4096
"""Most keys in one message: 72 KiB."""

TierKey = tuple[str, ChunkKey]


class ChangeFeed:
    """The last change of each chunk of one spec. It begins with all chunks that are held."""

    def __init__(self, held: Callable[[], Iterable[TierKey]], limit: int = MAX_CHANGES) -> None:
        self._held = held
        self._limit = limit
        self._snapshot = deque(held())
        """Chunks that were held when the feed began, and were not sent yet."""
        self._changes: dict[TierKey, bool] = {}
        """Whether the chunk is held, by what has changed since."""
        self._overflowed = False

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self._snapshot or self._changes or self._overflowed)

    def add(self, tier: str, key: ChunkKey, *, held: bool) -> None:
        """Notes a change. Call it in the step that makes `held` yield or omit the chunk."""
        if self._overflowed:
            return
        self._changes[tier, key] = held
        if len(self._changes) > self._limit:
            self.restart()

    def restart(self) -> None:
        """Begins again with all chunks that are held when the next message is made."""
        self._snapshot.clear()
        self._changes.clear()
        self._overflowed = True

    def take(self) -> list[pb.TierChange]:
        """Removes what one message can carry."""
        taken = []
        if self._overflowed:
            self._overflowed = False
            self._snapshot.extend(self._held())
            taken.append(pb.TierChange(restarted=True))
        if self._snapshot:
            keys = [self._snapshot.popleft() for _ in range(min(MAX_KEYS, len(self._snapshot)))]
            return taken + _changes((one, True) for one in keys)
        changes = list(islice(self._changes.items(), MAX_KEYS))
        for one, _ in changes:
            del self._changes[one]
        return taken + _changes(changes)


def _changes(states: Iterable[tuple[TierKey, bool]]) -> list[pb.TierChange]:
    """One message for each tier."""
    changes: dict[str, pb.TierChange] = {}
    for (tier, key), held in states:
        change = changes.setdefault(tier, pb.TierChange(tier=tier))
        (change.stored_keys if held else change.removed_keys).append(key)
    return list(changes.values())


MERGED_BYTES = rpc.MAX_MESSAGE_BYTES // 2
"""Answers are merged into messages of at most this size."""

MAX_WAITING_BYTES = 64 << 20
"""Answers that wait for an engine to read them. Beyond it, the node reads nothing more from the engine either, whose
connection then ends like that of one that does not answer."""
EVENT_FRAMING_BYTES = 5
"""Bytes of a message besides an event's own: its tag and length."""


class Outbox:
    """A queue of events, merged until the stream takes them: a busy stream sends fewer, larger messages."""

    def __init__(self, changes: ChangeFeed | None = None) -> None:
        """`changes` are sent with the answers; None if the engine does not want them."""
        self._changes = changes
        self._pending: deque[pb.AttachResponse] = deque()
        self._sizes: deque[int] = deque()
        """Bytes of each pending message, as they were added."""
        self._filled = asyncio.Event()
        self._ended = False
        if changes:
            self._filled.set()

    @property
    def is_full(self) -> bool:
        """Whether the engine does not read its answers: further answers are dropped, and its stream ends."""
        return sum(self._sizes) > MAX_WAITING_BYTES

    def put(self, event: pb.Event) -> None:
        """Adds an event to the last message that waits if its size allows, else to a new one."""
        size_bytes = event.ByteSize() + EVENT_FRAMING_BYTES
        if not self._pending or self._sizes[-1] + size_bytes > MERGED_BYTES:
            if self.is_full:
                return
            self._pending.append(pb.AttachResponse())
            self._sizes.append(0)
        self._pending[-1].events.append(event)
        self._sizes[-1] += size_bytes
        self._filled.set()

    def changed(self, tier: str, key: ChunkKey, *, held: bool) -> None:
        """Adds a change of what the node holds; only with a feed."""
        assert self._changes is not None
        self._changes.add(tier, key, held=held)
        self._filled.set()

    def restart_changes(self) -> None:
        """Begins again with what the node holds, if changes are sent: the engine has another spec."""
        if self._changes is not None:
            self._changes.restart()
            self._filled.set()

    def end(self) -> None:
        """Ends the queue: `take` returns None once it is empty."""
        self._ended = True
        self._filled.set()

    async def take(self) -> pb.AttachResponse | None:
        """Waits for the next message; None at the end."""
        await self._filled.wait()
        if self._ended and not self._pending:
            return None
        message = pb.AttachResponse()
        if self._pending:
            message = self._pending.popleft()
            self._sizes.popleft()
        if self._changes:
            message.events.extend(pb.Event(tier_change=change) for change in self._changes.take())
        if not self._pending and not self._changes and not self._ended:
            self._filled.clear()
        return message


class RequestTasks:
    """Runs at most one task per request. Tasks end with the engine's stream."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, lookup_id: str, work: Coroutine[None, None, None]) -> None:
        """Runs `work` until it ends or the request is cancelled."""
        task = asyncio.create_task(work)
        self._tasks[lookup_id] = task
        task.add_done_callback(lambda done: self._remove(lookup_id, done))

    def cancel(self, lookup_id: str) -> None:
        """Cancels the task of a request. Idempotent."""
        if task := self._tasks.pop(lookup_id, None):
            task.cancel()

    def close(self) -> None:
        """Cancels all tasks."""
        for task in self._tasks.values():
            task.cancel()

    def _remove(self, lookup_id: str, done: asyncio.Task[None]) -> None:
        if self._tasks.get(lookup_id) is done:
            del self._tasks[lookup_id]
        if not done.cancelled() and (error := done.exception()):
            logger.error("the task of lookup %s failed unexpectedly", lookup_id, exc_info=error)
