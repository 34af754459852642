"""Carries out hints on the node's tiers. A hint may take bounded resources; a hint that fails costs only itself.

Hints come from engines, and from a coordinator's clients as orders. Work that continues after the result, such as a
prefetch of chunks into the pool, ends with the node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmkv.errors import BadChunkKey, BadMessage, Full, LmkvError
from lmkv.hints import MAX_TTL_SECONDS, HintAction, HintOutcome, HintReason, HintResult, reject
from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.runtime.places import Places, most_of, requester
from lmkv.runtime.turns import Slots
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.cache.pins import MAX_PINS
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.hints.prompt_hint import PromptHint
from lmkv_server.node.hints.retentions import Retentions
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.base import Loaded

logger = logging.getLogger(__name__)

MAX_TASKS = 64
"""Most prefetches and demotions that run or wait."""


class BackgroundTasks:
    """The tasks of one node's hints. Engines have shares of their number."""

    def __init__(self) -> None:
        self._tasks = Places[asyncio.Task[None]]("hints", MAX_TASKS, most_of(MAX_TASKS))
        self._is_closing = False

    @property
    def is_full(self) -> bool:
        """Whether no more hints of this requester may start work."""
        try:
            self._tasks.check(requester.get())
        except Full:
            return True
        return self._is_closing

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` until it ends or the node does. It must not be full."""
        task = asyncio.create_task(work)
        self._tasks.take(task, requester.get())
        task.add_done_callback(self._ended)

    async def settle(self) -> None:
        """Returns once no task runs."""
        while tasks := list(self._tasks):
            await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Cancels all tasks; no more may start. Idempotent."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await self.settle()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.release(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("a hint failed unexpectedly", exc_info=error)


POOL_SHARE = 4
"""One prefetch brings at most 1/4 of the pool."""
MAX_READS = 4
"""Prefetches that read at a time; others wait."""
READ_SECONDS = 30.0
REPLICA_SHARE = 16
"""Hints to replicate bring at most 1/16 of the pool per minute, all together."""
REPLICA_SECONDS = 60.0
REPLICA_STEP_BYTES = 256 << 20
"""Bytes that they read before they look whether the node loads for others."""


class Prefetches:
    """The prefetches of one node. The chunks may be evicted like any other once they have arrived.

    A hint to replicate is a prefetch that gives way: it begins and continues only while the node loads nothing else.
    """

    def __init__(self, tier: HostTier, stack: TierStack, background: BackgroundTasks) -> None:
        self._tier = tier
        self._stack = stack
        self._background = background
        self._slots = Slots(MAX_READS)
        self._is_replicating = False
        self._replicated_bytes = 0.0
        """What hints to replicate have brought, less what the time since then allows."""
        self._replicated_at = 0.0

    async def begin(self, hint: PromptHint) -> HintResult:
        """Looks the prompt up, and begins to read what the pool lacks. Raises nothing but for cancellation."""
        if hint.action is not HintAction.REPLICATE:
            return await self._begin(hint, max(hint.spec.chunk_bytes, self._tier.size_bytes // POOL_SHARE))
        if self._stack.is_loading or self._is_replicating:
            return hint.rejected(HintReason.BUSY, "the node loads other chunks")
        room = self._replica_room(time.monotonic())
        if room < hint.spec.chunk_bytes:
            return hint.rejected(
                HintReason.QUOTA, f"1/{REPLICA_SHARE} of the pool was brought by such hints within a minute"
            )
        self._is_replicating = True
        try:
            return await self._begin(hint, room)
        finally:
            self._is_replicating = False

    async def _begin(self, hint: PromptHint, most_bytes: int) -> HintResult:
        lookup = self._stack.begin(hint.prompt(self._tier), self._tier.size_bytes)
        lookup.most_bytes = lookup.own_bytes + most_bytes
        if not lookup.is_complete and self._stack.usable:
            await self._stack.ask(lookup)
        found = lookup.result()
        if not found.chunk_count:
            return hint.ended(HintOutcome.MISSING)
        outcome = HintOutcome.ACCEPTED if found.chunk_count == len(hint.keys) else HintOutcome.CLIPPED
        if found.absent_count:
            if self._background.is_full:
                return hint.rejected(HintReason.QUOTA, f"{MAX_TASKS} hints run already")
            if self._slots.is_locked:
                outcome = HintOutcome.DEFERRED
            if hint.action is HintAction.REPLICATE:
                self._replicated_bytes += found.absent_count * hint.spec.chunk_bytes
                self._background.start(self._replicate(found))
            else:
                self._background.start(self._read(found))
        return hint.ended(outcome, found.chunk_count)

    def _replica_room(self, now: float) -> int:
        """Bytes that hints to replicate may bring now."""
        most = self._tier.size_bytes // REPLICA_SHARE
        allowed = most * (now - self._replicated_at) / REPLICA_SECONDS
        self._replicated_bytes, self._replicated_at = max(0.0, self._replicated_bytes - allowed), now
        return int(most - self._replicated_bytes)

    async def _read(self, found: Found) -> None:
        async with self._slots.take(requester.get()):
            await self._load(found, range(len(found.own), len(found.items)))
        self._tier.find(found.items.keys)  # counts as a use: the prompt is about to be

    async def _replicate(self, found: Found) -> None:
        step = max(1, REPLICA_STEP_BYTES // found.items.spec.chunk_bytes)
        for first in range(len(found.own), len(found.items), step):
            if self._stack.is_loading:
                return
            loaded = await self._load(found, range(first, min(first + step, len(found.items))))
            if loaded.error:
                return
        self._tier.find(found.items.keys)

    async def _load(self, found: Found, wanted: range) -> Loaded:
        def unhold(chunks: Sequence[tuple[int, Chunk]]) -> None:
            self._tier.unhold(chunk for _, chunk in chunks)

        return await self._stack.load(found, wanted, READ_SECONDS, unhold)


PIN_SHARE = 4
"""Pins of hints take at most 1/4 of the pool; those of one owner half of that, and no more than its quota."""
MAX_HINT_PINS = MAX_PINS // 2
RETAIN_SHARE = 2
"""Retained chunks take at most 1/2 of the pool; those of one owner half of that, and no more than its quota."""
DEMOTE_SECONDS = 30.0
"""Most time that demoted chunks stay as they are because they wait to be written."""
BUSY = f"{MAX_TASKS} hints run already"
IN_USE = "other prompts continue all of it, or it is pinned"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPrompt:
    """The part of a hint's prompt that the pool holds."""

    chunks: Sequence[Chunk] = ()
    """The first chunks of the prompt; if chunks have several parts, the items of the longest hit, part by part."""
    prompt_chunks: int = 0


class HintExecutor:
    """Executes hints; an async context manager. `apply` and `prefetch` raise nothing but for cancellation."""

    def __init__(self, instance_id: str, stack: TierStack, orders: OrderRunner) -> None:
        """`orders` have the pins of the node, and report and end those of hints."""
        tier = stack.tier
        self.retentions = Retentions(tier, tier.size_bytes // RETAIN_SHARE)
        """A listener of what the tiers remove."""
        self._instance_id = instance_id
        self._tier = tier
        self._stack = stack
        self._stores = [store for store in stack.tiers if isinstance(store, BackendTier)]
        self._orders = orders
        self._pins = orders.pins
        self._counts: Counter[tuple[str, str]] = Counter()
        self._timer = DeadlineTimer(self._expire)
        self._background = BackgroundTasks()
        self._prefetches = Prefetches(tier, stack, self._background)
        self._actions: dict[HintAction, Callable[[PromptHint, HeldPrompt], HintResult]] = {
            HintAction.SHARE: self._share,
            HintAction.PIN: self._pin,
            HintAction.RETAIN: self._retain,
            HintAction.DEMOTE: self._demote,
            HintAction.EVICT: self._evict,
        }

    async def __aenter__(self) -> HintExecutor:
        await self._timer.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._timer.aclose()
        await self._background.aclose()

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """Hints by action and outcome, since the start."""
        return self._counts

    def pin_id(self, hint_id: str) -> str:
        """Id of the pin of a hint: behind the last slash is what is unique at the instance."""
        return f"{self._instance_id}/{hint_id.replace('/', ':')}"

    def apply(self, hint: PromptHint) -> HintResult:
        """Carries out a hint that brings no chunks."""
        try:
            result = self._actions[hint.action](hint, self._held(hint))
        except LmkvError as error:
            result = hint.rejected(HintReason.QUOTA if isinstance(error, Full) else HintReason.FAILED, str(error))
        return self._counted(result)

    async def prefetch(self, hint: PromptHint) -> HintResult:
        """Begins to bring chunks into the pool. The result arrives when it is known which tiers hold them."""
        return self._counted(await self._prefetches.begin(hint))

    async def settle(self) -> None:
        """Returns once nothing runs in the background."""
        await self._background.settle()

    # --- Actions -------------------------------------------------------------------------------------------------

    def _share(self, hint: PromptHint, held: HeldPrompt) -> HintResult:
        shared = [store for store in self._stores if not store.is_local and store.usable]
        if not shared and not self._stack.has_peers:
            return hint.rejected(HintReason.NO_TIER, "the node has neither peers nor a remote store")
        self._tier.use(held.chunks)
        for store in shared:
            for chunk in held.chunks:
                store.writer.add(chunk)
        return hint.ended(hint.reached(held.prompt_chunks), len(held.chunks))

    def _pin(self, hint: PromptHint, held: HeldPrompt) -> HintResult:
        pin_id = self.pin_id(hint.hint_id)
        if self._pins.get(pin_id) is None and self._pins.owned_count >= MAX_HINT_PINS:
            return hint.rejected(HintReason.QUOTA, f"{MAX_HINT_PINS} pins of hints are in force")
        limit = self._tier.size_bytes // PIN_SHARE
        own = limit // 2 if self._tier.quotas is None else min(limit // 2, self._tier.quotas.limit_bytes)
        room = min(limit - self._pins.owned_bytes(), own - self._pins.owned_bytes(hint.owner))
        count = 0
        for chunk in held.chunks:
            if not self._pins.is_owned(hint.owner, chunk):
                room -= align(chunk.size_bytes)
            if room < 0:
                break
            count += 1
        if not self._is_enough(hint, held, count):
            return self._unkept(hint, held, "pins of hints")
        ttl = min(hint.ttl_seconds, MAX_TTL_SECONDS)
        keys = [chunk.key for chunk in held.chunks[:count]]
        self._pins.pin(pin_id, keys, time.monotonic(), ttl, owner=hint.owner)
        self._tier.adopt(held.chunks[:count], hint.owner)
        self._orders.pins_changed()
        return self._kept(hint, held, count, ttl)

    def _retain(self, hint: PromptHint, held: HeldPrompt) -> HintResult:
        ttl = min(hint.ttl_seconds, MAX_TTL_SECONDS)
        count = self.retentions.room(held.chunks, hint.owner)
        if not self._is_enough(hint, held, count):
            return self._unkept(hint, held, "retained chunks")
        self.retentions.retain(held.chunks[:count], hint.owner, hint.priority, time.monotonic() + ttl)
        self._tier.adopt(held.chunks[:count], hint.owner)
        self._timer.changed()
        return self._kept(hint, held, count, ttl)

    def _is_enough(self, hint: PromptHint, held: HeldPrompt, count: int) -> bool:
        """Whether the first `count` chunks are of use: of a hit that is all or nothing, only all of them are."""
        return count > 0 if hint.spec.matches_prefixes else 0 < count == len(held.chunks)

    def _kept(self, hint: PromptHint, held: HeldPrompt, count: int, ttl_seconds: float) -> HintResult:
        is_whole = count == len(held.chunks)
        outcome = hint.reached(held.prompt_chunks) if is_whole else HintOutcome.CLIPPED
        return hint.ended(outcome, count, ttl_seconds)

    def _unkept(self, hint: PromptHint, held: HeldPrompt, what: str) -> HintResult:
        if held.chunks:
            return hint.rejected(HintReason.QUOTA, f"{what} have all of the pool that they may take")
        ttl_seconds = min(hint.ttl_seconds, MAX_TTL_SECONDS) if hint.is_running else 0.0
        return hint.ended(hint.reached(0), ttl_seconds=ttl_seconds)

    def _demote(self, hint: PromptHint, held: HeldPrompt) -> HintResult:
        stores = [store for store in self._stores if store.usable]
        if not stores:
            return hint.rejected(HintReason.NO_TIER, "the node has neither a disk nor a remote store that can be used")
        if hint.is_running or not held.chunks:
            return hint.ended(hint.reached(0))
        if not (chunks := self._free_tail(held)):
            return hint.rejected(HintReason.IN_USE, IN_USE)
        if all(_is_stored(chunk, stores) for chunk in chunks):
            self._evict_first(chunks, stores)
        elif self._background.is_full:
            return hint.rejected(HintReason.QUOTA, BUSY)
        else:
            for store in stores:
                for chunk in reversed(chunks):
                    store.writer.add(chunk)
            self._background.start(self._demote_written(chunks, stores))
        return self._left(hint, held, chunks)

    def _evict(self, hint: PromptHint, held: HeldPrompt) -> HintResult:
        if hint.is_running or not held.chunks:
            return hint.ended(hint.reached(0))
        if not (chunks := self._free_tail(held)):
            return hint.rejected(HintReason.IN_USE, IN_USE)
        keys = [chunk.key for chunk in chunks]
        for key in keys:
            self._tier.supersede(key)  # the disk evicts it before others, but not before a chunk that follows it there
        self._tier.drop(keys)
        return self._left(hint, held, chunks)

    def _left(self, hint: PromptHint, held: HeldPrompt, chunks: Sequence[Chunk]) -> HintResult:
        is_whole = len(chunks) == len(held.chunks) and held.prompt_chunks == len(hint.keys)
        return hint.ended(HintOutcome.ACCEPTED if is_whole else HintOutcome.CLIPPED, len(chunks))

    # --- The pool ------------------------------------------------------------------------------------------------

    def _held(self, hint: PromptHint) -> HeldPrompt:
        """Returns the part of the prompt that the pool holds, from its beginning on."""
        lookup = self._stack.begin(hint.prompt(self._tier), self._tier.size_bytes)
        found = lookup.result(is_use=False)
        return HeldPrompt(chunks=found.own, prompt_chunks=found.chunk_count)

    def _free_tail(self, held: HeldPrompt) -> list[Chunk]:
        """The chunks from the end of the prompt on, last first, that no other prompt continues and no pin keeps."""
        return self._tier.own_tail([chunk.key for chunk in held.chunks])

    async def _demote_written(self, chunks: Sequence[Chunk], stores: Sequence[BackendTier[Any]]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEMOTE_SECONDS):
                await asyncio.gather(*(store.writer.flush() for store in stores))
        self._evict_first(chunks, stores)

    def _evict_first(self, chunks: Sequence[Chunk], stores: Sequence[BackendTier[Any]]) -> None:
        for chunk in chunks:
            if not chunk.dropped and not chunk.pins and _is_stored(chunk, stores):
                self.retentions.end(chunk.key)
                self._tier.demote(chunk.key)

    def _expire(self) -> float | None:
        self.retentions.expire(time.monotonic())
        return self.retentions.next_expiry()

    def _counted(self, result: HintResult) -> HintResult:
        self._counts[result.action, result.outcome] += 1
        return result


def _is_stored(chunk: Chunk, stores: Sequence[BackendTier[Any]]) -> bool:
    return any(store.has(chunk.key) for store in stores)


async def carry_out(order: pb.HintOrder, executor: HintExecutor, engines: EngineSessions) -> HintResult:
    """The result of a hint about chunks of any spec with which an engine has attached; a malformed one is rejected.

    Raises nothing but for cancellation.
    """
    spec = engines.spec(order.fingerprint)
    if spec is None:
        return HintResult(action_id="", action="", outcome=HintOutcome.MISSING)
    try:
        hint = PromptHint.read(order, spec, owner=order.owner)
    except (BadMessage, BadChunkKey) as error:
        return reject("", "", HintReason.MALFORMED, str(error))
    return await executor.prefetch(hint) if hint.action.brings_chunks else executor.apply(hint)
