"""A client that looks prompts up at coordinators, without a node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import grpc

from lmkv.rpc.messages import by_keys
from lmkv.v1.cache_service_pb2 import LookupRequest
from tests.chaos.actor import Actor
from tests.chaos.engine import PROMPTS
from tests.chaos.operators import Line
from tests.chaos.victim import Coordinator


class AskActor(Actor):
    """Raises `Hangs` if a coordinator without a fault does not answer, whatever the faults of other processes."""

    def __init__(self, coordinator: Coordinator, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"asker of {coordinator.name}", seed, counts)
        self._coordinator = coordinator

    async def run(self) -> None:
        """See `Actor`."""
        async with Line(self._coordinator) as line:
            while True:
                await asyncio.sleep(self.chance.uniform(0.02, 0.2))
                try:
                    await self._ask(line)
                except grpc.RpcError as error:
                    self._coordinator.overdue(error)
                    self.counts["questions in vain"] += 1

    async def _ask(self, line: Line) -> None:
        prompt = self.chance.choice(PROMPTS)
        answer = await line.ask(line.cache.Lookup, LookupRequest(prompt=by_keys(prompt)))
        self.counts["questions answered"] += 1
        self.counts["answers that were partial"] += not answer.is_complete


async def holders(line: Line, keys: Sequence[bytes]) -> tuple[list[set[str]], bool]:
    """Who holds each of the chunks, as a coordinator says, and whether any answer was partial."""
    questions = (LookupRequest(prompt=by_keys([key])) for key in keys)
    answers = await asyncio.gather(*(line.ask(line.cache.Lookup, question) for question in questions))
    said = [{holder.instance_id for holder in answer.holders} for answer in answers]
    return said, any(not answer.is_complete for answer in answers)
