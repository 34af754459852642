"""What `make cluster` checks of a fleet that runs: hits, moves, drains, and who is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.cluster.fleet import COORDINATOR, NODES, PROXY, Fleet, has_node, prompt
from tests.cluster.kubelet import RunningPod
from tests.cluster.nodes import load_at, store_at
from tests.cluster.stored import CHUNKS, WHOLE_CHUNKS, hit, known, stored, until_held

Check = Callable[[Fleet], Awaitable[str]]
"""Raises `AssertionError`; returns what it measured, for the table."""
BETWEEN_PODS = {"auto": "tcp", "nixl": "nixl", "tcp": "tcp"}
"""The channel between pods by the configured one: they share no memory and have no RDMA."""


async def hit_across_pods(fleet: Fleet) -> str:
    """A prompt that one engine computes is loaded by another in another pod with another node, over the network."""
    first, second = fleet.producers()[0], fleet.consumers()[-1]
    assert fleet.node_of(first) is not fleet.node_of(second)
    text = prompt(f"across-{fleet.transfer_channel}")
    said = await stored(fleet, first, text)
    loaded = await hit(fleet, second, text, said)
    return f"{loaded} tokens by {await channel_of(fleet, fleet.node_of(second), fleet.instance_of(first))}"


async def channel_of(fleet: Fleet, node: RunningPod, source: str) -> str:
    """The channel by which a node reads from an instance; asserts that it is what the configuration demands."""
    found, wanted = await fleet.channel_of(node, source), BETWEEN_PODS[fleet.transfer_channel]
    assert found == wanted, f"{node.pod.name} reads from {source} by {found or 'no channel'}, not {wanted}"
    return found


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
    """The pod of `helm test` lists all nodes, once they have registered: they are ready before."""
    nodes = [each for each in fleet.cluster.running.values() if has_node(each)]

    async def registered() -> bool:
        return len(await fleet.instances()) == len(nodes)

    await fleet.cluster.wait_for(registered, f"{len(nodes)} instances have registered")
    return f"{len(nodes)} instances"


async def chunks_across_pods(fleet: Fleet) -> str:
    """Chunks that are stored at the node of one host are found and loaded by the other's, over the network of pods."""
    first, second = fleet.cluster.hosts
    before = (await fleet.instances()).get(first, 0)
    number = 20_000 + 100 * list(BETWEEN_PODS).index(fleet.transfer_channel)
    await store_at(fleet.cluster, first, number, CHUNKS)

    async def reported() -> bool:
        return (await fleet.instances()).get(first, 0) >= before + CHUNKS

    await fleet.cluster.wait_for(reported, f"the chunks of {first} are reported")
    elsewhere = await load_at(fleet.cluster, second, number, CHUNKS)
    assert sum(elsewhere.values()) == CHUNKS, elsewhere
    (node,) = (each for each in fleet.cluster.of(NODES) if each.pod.host == second)
    return f"{CHUNKS} chunks by {await channel_of(fleet, node, first)}"


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


async def handoff(fleet: Fleet) -> str:
    """The proxy has one engine compute the prompt and another decode: it says what a single engine says."""
    (proxy,) = fleet.cluster.of(PROXY)
    decode = next(each for each in fleet.engines() if "decode" in each.pod.name)
    text = prompt(f"handoff-{fleet.transfer_channel}")
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
