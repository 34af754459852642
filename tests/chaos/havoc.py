"""Who carries out the schedule: signals to processes, trouble on links, jumps of clocks, full disks and memory."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.engine import SPEC
from tests.chaos.fleet import Fleet
from tests.chaos.link import Way
from tests.chaos.schedule import Fault, Kind
from tests.chaos.victim import POOL_BYTES

CROWD = 3
"""Engines that fill the memory of a node: each may reserve half of it."""
POOL_CHUNKS = POOL_BYTES // SPEC.chunk_bytes


class Havoc(Actor):
    """Does what the schedule says, when it says so, and takes it back. What is under way ends with it."""

    def __init__(self, fleet: Fleet, faults: Iterator[Fault], seed: int, counts: Counter[str]) -> None:
        super().__init__("havoc", seed, counts)
        self.done: list[Fault] = []
        """What was begun so far."""
        self._fleet = fleet
        self._faults = faults
        self._alone: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """What two faults cannot be in at a time: they come after each other."""

    async def run(self) -> None:
        """See `Actor`."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in self._faults:
                await asyncio.sleep(begin + fault.at - loop.time())
                group.create_task(self._last(fault), name=str(fault))

    async def _last(self, fault: Fault) -> None:
        async with self._trouble(fault):
            self.done.append(fault)
            self.counts[f"faults: {fault.kind}"] += 1
            await asyncio.sleep(fault.seconds)

    def _trouble(self, fault: Fault) -> AbstractAsyncContextManager[None]:
        match fault.kind:
            case Kind.KILL:
                return self._killed(fault)
            case Kind.FREEZE:
                return self._frozen(fault)
            case Kind.CLOCK:
                return self._jumped(fault)
            case Kind.FILL:
                return self._filled(fault)
            case Kind.CROWD:
                return self._crowded(fault)
            case Kind.REPEAT | Kind.REORDER:
                return self._mischief(fault)
            case _:
                return self._on_links(fault)

    @asynccontextmanager
    async def _killed(self, fault: Fault) -> AsyncIterator[None]:
        victim = self._fleet.victims[fault.target]
        async with self._alone[f"process of {fault.target}"]:
            victim.kill()
            try:
                yield
            finally:
                victim.start()

    @asynccontextmanager
    async def _frozen(self, fault: Fault) -> AsyncIterator[None]:
        victim = self._fleet.victims[fault.target]
        async with self._alone[f"process of {fault.target}"]:
            victim.freeze()
            try:
                yield
            finally:
                victim.thaw()

    @asynccontextmanager
    async def _jumped(self, fault: Fault) -> AsyncIterator[None]:
        clock = self._fleet.victims[fault.target].clock
        async with self._alone[f"clock of {fault.target}"]:
            clock.jump(fault.amount)
            try:
                yield
            finally:
                clock.jump(0.0)

    @asynccontextmanager
    async def _filled(self, fault: Fault) -> AsyncIterator[None]:
        disks = self._fleet.disks
        async with self._alone[f"disk of {fault.target}"]:
            try:
                if disks.can_be_full:
                    await asyncio.to_thread(disks.fill, fault.target)
                yield
            finally:
                if disks.can_be_full:
                    disks.free(fault.target)

    @asynccontextmanager
    async def _crowded(self, fault: Fault) -> AsyncIterator[None]:
        """The last of the engines gets only what the others have left. A node that is down or frozen is not crowded."""
        node = next(node for node in self._fleet.nodes if node.name == fault.target)
        async with self._alone[f"memory of {fault.target}"]:
            with suppress(*TROUBLE):
                async with AsyncExitStack() as engines:
                    with suppress(*TROUBLE):
                        for _ in range(CROWD):
                            engine = await engines.enter_async_context(node.engine())
                            granted = await engine.client.reserve(POOL_CHUNKS)
                            self.counts["extents kept from others"] += len(granted)
                    yield

    @asynccontextmanager
    async def _mischief(self, fault: Fault) -> AsyncIterator[None]:
        node, _, coordinator = fault.target.partition(">")
        relay = self._fleet.relays[coordinator]
        relay.begin(node, fault.kind)
        try:
            yield
        finally:
            relay.end(node, fault.kind)

    @asynccontextmanager
    async def _on_links(self, fault: Fault) -> AsyncIterator[None]:
        is_partition = fault.kind is Kind.PARTITION
        links = self._fleet.links_of(fault.target) if is_partition else [self._fleet.links[fault.target]]
        ways = (Way.ANSWERS,) if fault.kind is Kind.HALF_CUT else tuple(Way)
        for link in links:
            match fault.kind:
                case Kind.RESET:
                    link.refuse()
                case Kind.DELAY:
                    link.delay(fault.amount)
                case Kind.HALF_OPEN:
                    link.half_open()
                case _:
                    link.cut(*ways)
        try:
            yield
        finally:
            for link in links:
                match fault.kind:
                    case Kind.RESET:
                        link.accept()
                    case Kind.DELAY:
                        link.hurry(fault.amount)
                    case Kind.HALF_OPEN:
                        pass
                    case _:
                        link.mend(*ways)
