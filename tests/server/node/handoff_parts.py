"""What tests of handoffs do at the decode's node."""

from __future__ import annotations

from lmkv.keys import ChunkKey
from lmkv_server.node.handoff.state import HandoffState
from lmkv_server.node.tiers.base import Needs, Progress
from tests.server.node.peer_parts import Parts, Taken
from tests.waiting import until


async def finish(decode: Parts) -> None:
    """Every request is over."""
    for handoff in list(decode.receiver.handoffs):
        decode.receiver.handoffs.unclaim(handoff.handoff_id)
    await until(lambda: decode.tier.reserved_count == 0)
    decode.check_nothing_left()


def state_of(decode: Parts, name: str = "r") -> HandoffState | None:
    """How far a handoff is."""
    handoff = decode.receiver.handoffs.find(name)
    return handoff.state if handoff else None


def is_committed(decode: Parts, name: str) -> bool:
    return state_of(decode, name) is HandoffState.COMMITTED


async def follow(decode: Parts, name: str, keys: list[ChunkKey], seconds: float = 10.0) -> Taken:
    """A request of the decode comes for a handoff, and takes what it brings."""
    taken = Taken(decode)
    progress = Progress(decode.tier, Needs(spec=decode.spec, keys=keys, indices=range(len(keys))), taken)
    try:
        await decode.receiver.follow(name, progress, seconds)
    finally:
        progress.close()
    return taken
