"""Chunks that checks store, and how they see where these are: of prompts, or scripted ones if there are no engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lmkv.errors import LmkvError
from lmkv.misses import MissReason
from tests.cluster.fleet import MODEL, Fleet, prompt
from tests.cluster.kubelet import RunningPod
from tests.cluster.nodes import Missed, load_at, store_at
from tests.server.node.cases import chunk_keys
from tests.server.node.whole_nodes import SPEC

CHUNKS = 8
"""Chunks that a scripted engine stores."""
WHOLE_CHUNKS = 1792
"""Tokens of the whole chunks of a prompt of 2000 tokens."""
UNREPORTED = "no engine has registered yet"
"""What a coordinator answers to lookups before the fleet's first engine has been reported to it."""


async def stored(fleet: Fleet, running: RunningPod, text: str) -> str:
    """Has an engine compute a prompt, waits until its chunks are reported, and returns the completion."""
    answer = await fleet.complete(running, text)
    flags = await flags_of(fleet, text)

    async def reported() -> bool:
        return max((await holders(fleet, flags)).values(), default=0) >= WHOLE_CHUNKS // 256

    await fleet.cluster.wait_for(reported, "the chunks of a prompt are reported")
    return answer.text


async def flags_of(fleet: Fleet, text: str) -> list[str]:
    """The flags by which `lmkv` names the chunks of a prompt."""
    tokens = await fleet.tokens(fleet.engines()[0], text)
    return ["--tokens", ",".join(map(str, tokens)), "--model", MODEL]


async def holders(fleet: Fleet, flags: list[str]) -> dict[str, int]:
    """The number of chunks that each instance holds; none before an engine is reported."""
    try:
        return await fleet.holders(flags)
    except LmkvError as error:
        if UNREPORTED in str(error):
            return {}
        raise


async def hit(fleet: Fleet, running: RunningPod, text: str, expected: str, least: int = WHOLE_CHUNKS) -> int:
    """Has an engine complete a prompt; asserts that it says the same. Returns the tokens that it loaded.

    Raises `Missed` if these are too few.
    """
    await fleet.forget(running)
    answer = await fleet.complete(running, text)
    assert answer.text == expected, f"{running.pod.name} says {answer.text!r}, not {expected!r}"
    if answer.cached_tokens < least:
        raise Missed(f"{running.pod.name} loaded {answer.cached_tokens} tokens, not {least}; {await misses(fleet)}")
    return answer.cached_tokens


async def misses(fleet: Fleet) -> str:
    """Why engines have missed tokens since they started, as their metrics say."""
    found = {}
    for running in fleet.engines():
        for reason in MissReason:
            metrics = await asyncio.to_thread(fleet.endpoint(running).metrics, reason=reason.value)
            if count := sum(value for name, value in metrics.items() if name.endswith("miss_tokens_total")):
                found[f"{running.pod.name} {reason}"] = int(count)
    return f"missed so far: {found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Chunks that one instance holds, and another may get."""

    flags: list[str]
    """By which `lmkv` names them."""
    count: int
    source: str
    destination: str
    check_loads: Callable[[], Awaitable[object]]
    """Asserts that an engine of the destination loads them."""


async def known(fleet: Fleet, name: str) -> Known:
    """Has an engine of one instance store chunks: of a prompt, or scripted ones if there are no engines."""
    if fleet.engines():
        first, second = fleet.producers()[0], fleet.consumers()[-1]
        text = prompt(name)
        said = await stored(fleet, first, text)
        return Known(
            flags=await flags_of(fleet, text),
            count=WHOLE_CHUNKS // 256,
            source=fleet.instance_of(first),
            destination=fleet.instance_of(second),
            check_loads=lambda: hit(fleet, second, text, said),
        )
    source, destination = fleet.cluster.hosts
    start = 10_000 + 100 * len(name)
    await store_at(fleet.cluster, source, start, CHUNKS)
    keys = chunk_keys(*range(start, start + CHUNKS))
    return Known(
        flags=["--keys", ",".join(key.hex() for key in keys), "--model", SPEC.model_name],
        count=CHUNKS,
        source=source,
        destination=destination,
        check_loads=lambda: load_held(fleet, destination, start),
    )


async def load_held(fleet: Fleet, host: str, first: int) -> None:
    """Loads chunks at a node. Raises `Missed` unless all of them are in its own memory."""
    if elsewhere := await load_at(fleet.cluster, host, first, CHUNKS):
        raise Missed(f"{host} has lost {elsewhere}")


async def share(fleet: Fleet, source: str, destination: str, number: int) -> None:
    """Stores what no other number has at one host, and loads it at another. Raises `Missed`."""
    if not fleet.engines():
        first = 100_000 + 100 * number
        await store_at(fleet.cluster, source, first, CHUNKS)
        await load_at(fleet.cluster, destination, first, CHUNKS)
        return
    producer = next(each for each in fleet.producers() if each.pod.host == source)
    consumer = next(each for each in fleet.consumers() if each.pod.host == destination)
    text = prompt(f"share-{number}")
    said = await stored(fleet, producer, text)
    await hit(fleet, consumer, text, said)


async def until_held(fleet: Fleet, chunks: Known, *instances: str) -> None:
    """Waits until these instances and no others hold the chunks, as the coordinators see it.

    Engines may also have stored the incomplete chunk at the end of a prompt.
    """

    async def reached() -> bool:
        held = await holders(fleet, chunks.flags)
        return held.keys() == set(instances) and min(held.values()) >= chunks.count

    await fleet.cluster.wait_for(reached, f"{instances} hold {chunks.count} chunks")


async def remembered(fleet: Fleet, name: str) -> Callable[[], Awaitable[None]]:
    """Stores a prompt, or chunks at each node if there are no engines; returns a check that nothing of it is lost.

    The check tries once: a second attempt would load what the first one computed.
    """
    if producers := fleet.producers():
        text = prompt(name)
        said = await stored(fleet, producers[0], text)

        async def prompts_hit() -> None:
            for engine in fleet.consumers():
                await hit(fleet, engine, text, said)

        return prompts_hit
    hosts = list(fleet.cluster.hosts)
    firsts = {host: 1000 * number + 100 * len(name) for number, host in enumerate(hosts, start=1)}
    for host, first in firsts.items():
        await store_at(fleet.cluster, host, first, CHUNKS)

    async def chunks_are_kept() -> None:
        for host, first in firsts.items():
            await load_held(fleet, host, first)

    return chunks_are_kept
