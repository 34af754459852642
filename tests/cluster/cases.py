"""The cases of `make cluster`: values of the chart, and what is checked of the fleet that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmkv.errors import LmkvError
from tests.cluster.fleet import COORDINATOR, MODEL, NODES, PROXY, Fleet, has_node, prompt
from tests.cluster.kubelet import RunningPod
from tests.cluster.nodes import load_at, store_at
from tests.cluster.secrets import secret, tokens
from tests.cluster.translation import Manifest
from tests.server.node.cases import chunk_keys
from tests.server.node.whole_nodes import SPEC

Check = Callable[[Fleet], Awaitable[str]]
"""Raises `AssertionError`; returns what it measured, for the table."""
CHUNKS = 8
"""Chunks that a scripted engine stores."""
WHOLE_CHUNKS = 1792
"""Tokens of the whole chunks of a prompt of 2000 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Values, and the checks in their order."""

    values: Mapping[str, Any]
    checks: Sequence[Check]
    secrets: Callable[[], Sequence[Manifest]] = field(default=lambda: ())
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Programs of this machine that the fleet uses, by their DNS names."""
    hosts: Sequence[str] = ("host-1", "host-2")


async def stored(fleet: Fleet, running: RunningPod, text: str) -> str:
    """Has an engine compute a prompt, waits until its node has reported chunks, and returns the completion."""
    before = sum((await fleet.instances()).values())
    answer = await fleet.complete(running, text)

    async def reported() -> bool:
        return sum((await fleet.instances()).values()) >= before + WHOLE_CHUNKS // 256

    await fleet.cluster.wait_for(reported, "the chunks of a prompt are reported")
    return answer.text


async def hit(fleet: Fleet, running: RunningPod, text: str, expected: str, least: int = WHOLE_CHUNKS) -> int:
    """Has an engine complete a prompt; asserts that it loads its chunks and says the same. Returns what it loaded."""
    await fleet.forget(running)
    answer = await fleet.complete(running, text)
    assert answer.text == expected, f"{running.pod.name} says {answer.text!r}, not {expected!r}"
    assert answer.cached_tokens >= least, f"{running.pod.name} loaded {answer.cached_tokens} tokens, not {least}"
    return answer.cached_tokens


async def hit_across_pods(fleet: Fleet) -> str:
    """A prompt that one engine computes is loaded by another in another pod with another node, over the network."""
    first, second = fleet.producers()[0], fleet.consumers()[-1]
    assert fleet.node_of(first) is not fleet.node_of(second)
    text = prompt("across")
    said = await stored(fleet, first, text)
    loaded = await hit(fleet, second, text, said)
    return f"{loaded} tokens by {await channel_of(fleet, fleet.node_of(second))}"


async def channel_of(fleet: Fleet, node: RunningPod) -> str:
    """The channel by which a node reads from others; asserts that it is the configured one, and over the network."""
    channels = await fleet.channels_of(node)
    wanted = {"nixl", "tcp"} if fleet.transfer_channel == "auto" else {fleet.transfer_channel}
    assert channels, f"{node.pod.name} has not read from another node"
    assert channels <= wanted, f"{node.pod.name} reads by {channels}, not {wanted}"
    return ", ".join(sorted(channels))


async def hit_through_proxy(fleet: Fleet) -> str:
    """The proxy finds its engines by their names, and a repeated prompt hits."""
    (proxy,) = fleet.cluster.of(PROXY)
    text = prompt("proxy")
    said = await stored(fleet, proxy, text)
    again = await fleet.complete(proxy, text)
    assert again.text == said
    assert again.cached_tokens >= WHOLE_CHUNKS, again.cached_tokens
    return f"{again.cached_tokens} tokens"


async def helm_test(fleet: Fleet) -> str:
    """The pod of `helm test` lists all nodes."""
    found = await fleet.instances()
    nodes = [each for each in fleet.cluster.running.values() if has_node(each)]
    assert len(found) == len(nodes), found
    return f"{len(found)} instances"


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
        tokens = await fleet.tokens(first, text)
        return Known(
            flags=["--tokens", ",".join(map(str, tokens)), "--model", MODEL],
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
    """Loads chunks at a node; asserts that all of them are in its own memory."""
    fetched = await load_at(fleet.cluster, host, first, CHUNKS)
    assert fetched == 0, f"{host} has lost {fetched} chunks"


async def until_held(fleet: Fleet, chunks: Known, *instances: str) -> None:
    """Waits until these instances and no others hold the chunks, as the coordinators see it.

    Engines may also have stored the incomplete chunk at the end of a prompt.
    """

    async def reached() -> bool:
        held = await fleet.holders(chunks.flags)
        return held.keys() == set(instances) and min(held.values()) >= chunks.count

    await fleet.cluster.wait_for(reached, f"{instances} hold {chunks.count} chunks")


async def move(fleet: Fleet) -> str:
    """`lmkv move` brings chunks to another host's memory; the source drops them, and an engine there loads them."""
    chunks = await known(fleet, "move")
    await until_held(fleet, chunks, chunks.source)
    await fleet.order("move", "--from", chunks.source, "--to", chunks.destination, *chunks.flags)
    await until_held(fleet, chunks, chunks.destination)
    await chunks.check_loads()
    return f"{chunks.count} chunks"


async def drain(fleet: Fleet) -> str:
    """`lmkv drain` copies what only one instance holds to others."""
    chunks = await known(fleet, "drain it")
    await until_held(fleet, chunks, chunks.source)
    await fleet.order("drain", chunks.source, "--evict")
    await until_held(fleet, chunks, chunks.source, chunks.destination)
    await chunks.check_loads()
    return f"{chunks.count} chunks"


async def kill_each_kind(fleet: Fleet) -> str:
    """After `kill -9` in one pod of each workload, its containers run again and a prompt of before hits."""
    verify = await remembered(fleet, "kill")
    killed = []
    for owner in sorted({each.pod.owner for each in fleet.cluster.running.values()}):
        running = fleet.cluster.of(owner)[-1]
        await running.kill()
        await fleet.cluster.wait_until(
            lambda running=running: all(each.restarts for each in running.containers.values()),  # type: ignore[misc]
            f"{running.pod.name} is started again",
        )
        await settled(fleet)
        await verify()
        killed.append(owner.partition("/")[2].removeprefix("demo-lmkv-"))
    return ", ".join(killed)


async def settled(fleet: Fleet) -> None:
    """Waits until each node knows all coordinators, its engines and what its pool kept."""
    await fleet.cluster.wait_ready(fleet.cluster.running.values())
    coordinators = len(fleet.cluster.of(COORDINATOR))
    for running in [each for each in fleet.cluster.running.values() if has_node(each)]:
        engines = [each for each in fleet.engines() if each.pod.host == running.pod.host]
        expected = {
            "lmkv_node_coordinators_connected": coordinators,
            "lmkv_node_engines": 1 if running in engines else len(engines),
            "lmkv_node_warm_waiting_chunks": 0,
        }

        async def reached(running: RunningPod = running, expected: Mapping[str, int] = expected) -> bool:
            try:
                metrics = await fleet.metrics(running)
            except LmkvError:
                return False
            return all(metrics.get(name, 0) == value for name, value in expected.items())

        await fleet.cluster.wait_for(reached, f"{running.pod.name} has {expected}")


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


async def chunks_across_pods(fleet: Fleet) -> str:
    """Chunks that are stored at the node of one host are found and loaded by the other's, over the network of pods."""
    first, second = fleet.cluster.hosts
    await store_at(fleet.cluster, first, 0, CHUNKS)

    async def reported() -> bool:
        return (await fleet.instances()).get(first) == CHUNKS

    await fleet.cluster.wait_for(reported, f"the chunks of {first} are reported")
    fetched = await load_at(fleet.cluster, second, 0, CHUNKS)
    assert fetched == CHUNKS
    return f"{fetched} chunks"


async def rolling_restart(fleet: Fleet) -> str:
    """Every workload is replaced pod by pod in the order of upgrades; a prompt of before still hits at every engine."""
    verify = await remembered(fleet, "rolling")
    owners = sorted({each.pod.owner for each in fleet.cluster.running.values()}, key=rank)
    began = asyncio.get_running_loop().time()
    for owner in owners:
        await fleet.cluster.roll(owner)
        await settled(fleet)
        await verify()
    return f"{asyncio.get_running_loop().time() - began:.0f} s"


def rank(owner: str) -> tuple[int, str]:
    """The order of upgrades: coordinators, nodes, engines, proxies."""
    order = [COORDINATOR, NODES, "", PROXY]
    return (order.index(owner) if owner in order else 2, owner)


async def handoff(fleet: Fleet) -> str:
    """The proxy has one engine compute the prompt and another decode: it says what a single engine says."""
    (proxy,) = fleet.cluster.of(PROXY)
    decode = next(each for each in fleet.engines() if "decode" in each.pod.name)
    text = prompt("handoff")
    answer = await fleet.complete(proxy, text)
    metrics = await fleet.metrics(decode)
    received = metrics["lmkv_node_handoffs_received_total"]
    assert received >= 1, metrics
    alone = await fleet.complete(decode, text)
    assert answer.text == alone.text, (answer.text, alone.text)
    return f"{received:.0f} received, {metrics['lmkv_node_handoff_received_bytes_total'] / 1e6:.1f} MB"


async def strangers_are_refused(fleet: Fleet) -> str:
    """The coordinators and nodes accept no client without a certificate, and no certificate without a token."""
    (coordinator, *_) = fleet.cluster.of(COORDINATOR)
    address = "demo-lmkv-coordinator-headless.prod.svc:9000"
    code, output = await coordinator.execute("coordinator", "lmkv", "instances", "--coordinator", address)
    assert code != 0, output
    code, output = await coordinator.execute(
        *("coordinator", "env", "LMKV_TLS_CA=/etc/lmkv-tls/ca.crt", "LMKV_TLS_CERT=/etc/lmkv-tls/tls.crt"),
        *("LMKV_TLS_KEY=/etc/lmkv-tls/tls.key", "lmkv", "instances", "--coordinator", address),
    )
    assert code != 0, output
    assert "token" in output.lower(), output
    return "without certificate, without token"


TWO = [{"name": "tiny", "model": "/models/tiny", "replicas": 2}]
STORE, PASSWORD = "valkey.example", "of-the-layout-map"
ALWAYS: Sequence[Check] = (move, drain, kill_each_kind, rolling_restart)
"""What every case checks in the end."""

CASES: Mapping[str, Case] = {
    "nodes": Case(
        values={"coordinator": {"replicas": 2}},
        checks=(helm_test, chunks_across_pods, *ALWAYS),
    ),
    "valkey": Case(
        values={"coordinator": {"replicas": 2, "layoutMap": {"existingSecret": "layout-map"}}},
        checks=(helm_test, chunks_across_pods, *ALWAYS),
        secrets=lambda: (secret("layout-map", {"url": f"redis://:{PASSWORD}@{STORE}:6379/0".encode()}),),
        beside={STORE: ("redis-server", "--bind", "0.0.0.0", "--requirepass", PASSWORD, "--save", "")},
    ),
    "default": Case(
        values={
            "coordinator": {"replicas": 2},
            "engines": {"groups": TWO},
            "proxy": {"enabled": True, "policy": "kv_aware"},
        },
        checks=(helm_test, hit_across_pods, hit_through_proxy, *ALWAYS),
    ),
    "prefill-decode": Case(
        values={
            "node": {
                "mode": "sidecar",
                "transferChannel": "nixl",
                "config": {"pd_buffer_size": 64 << 20},
                "drain": {"enabled": True, "evict": True},
            },
            "engines": {
                "groups": [
                    {"name": role, "role": role, "model": "/models/tiny", "replicas": 1}
                    for role in ("prefill", "decode")
                ]
            },
            "proxy": {"enabled": True},
        },
        checks=(helm_test, handoff, hit_across_pods, *ALWAYS),
    ),
    "tls-tokens": Case(
        values={
            "coordinator": {"replicas": 2},
            "node": {"transferChannel": "nixl"},
            "tls": {"enabled": True, "mutual": True, "certManager": {"enabled": True, "issuerRef": {"name": "fleet"}}},
            "auth": {"tokensSecret": "tokens", "engineSecret": "engine", "readerSecret": "reader"},
            "clusterSecret": {"existingSecret": "fleet"},
            "engines": {"groups": TWO},
            "proxy": {"enabled": True, "policy": "kv_aware"},
        },
        checks=(helm_test, hit_across_pods, hit_through_proxy, strangers_are_refused, *ALWAYS),
        secrets=lambda: (*tokens("team-a"), secret("fleet", {"cluster-secret": b"one for all"})),
    ),
    "sidecar": Case(
        values={
            "coordinator": {"replicas": 2},
            "node": {
                "mode": "sidecar",
                "transferChannel": "tcp",
                "drain": {"enabled": True, "evict": True},
            },
            "engines": {"groups": TWO},
        },
        checks=(helm_test, hit_across_pods, *ALWAYS),
    ),
}
"""By name."""
