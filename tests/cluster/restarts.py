"""What `make cluster` checks of restarts: after kills and replacements, what was stored before hits."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Mapping, Sequence

from lmkv.errors import LmkvError
from tests.cluster.cluster import Change, unchanged
from tests.cluster.fleet import COORDINATOR, NODES, PROXY, Fleet, has_node
from tests.cluster.kubelet import RunningPod, Stop
from tests.cluster.nodes import load_at, store_at
from tests.cluster.stored import CHUNKS, known, remembered, until_held
from tests.cluster.translation import Pod, pods
from tests.server.node.cases import chunk_keys


async def settled(fleet: Fleet) -> None:
    """Waits until each node knows all coordinators, its engines and what its pool kept, and can store."""
    await fleet.cluster.wait_ready(fleet.cluster.running.values())
    coordinators = len(fleet.cluster.of(COORDINATOR))
    for running in [each for each in fleet.cluster.running.values() if has_node(each)]:
        engines = [each for each in fleet.engines() if each.pod.host == running.pod.host]
        expected = {
            "lmkv_node_coordinators_connected": coordinators,
            "lmkv_node_engines": 1 if running in engines else len(engines),
            "lmkv_node_warm_waiting_chunks": 0,
            "lmkv_node_pool_sealed": 0,
        }

        async def reached(running: RunningPod = running, expected: Mapping[str, int] = expected) -> bool:
            try:
                metrics = await fleet.metrics(running)
            except LmkvError:
                return False
            return all(metrics.get(name, 0) == value for name, value in expected.items())

        await fleet.cluster.wait_for(reached, f"{running.pod.name} has {expected}")


def restarts(fleet: Fleet, *, besides: str) -> dict[str, int]:
    """The restarts of each container of all workloads but one, by names that a replaced pod does not keep."""
    return {
        f"{running.pod.name}/{name} at {running.address}": state.restarts
        for running in fleet.cluster.running.values()
        if running.pod.owner != besides
        for name, state in running.containers.items()
    }


def assert_in_time(stop: Stop, owner: str) -> None:
    """Asserts that a pod stopped within its grace period, its `preStop` hook included. Engines may be busy longer."""
    late = [name for name in stop.killed if name != "engine"]
    assert not late, f"{owner}: {late} ran until the end of the grace period"
    for name, (code, output) in stop.hooks.items():
        assert code in (0, 3), f"{owner}/{name}: the hook ended with exit code {code}: {output}"  # 3: not all is copied


async def kill_and_wait(fleet: Fleet, running: RunningPod, *names: str) -> None:
    """`kill -9` of these containers of a pod, or of all; returns when they run again and all nodes are settled."""
    states = [running.containers[name] for name in names or running.containers]
    before = [each.restarts for each in states]
    await running.kill(*names)
    await fleet.cluster.wait_until(
        lambda: all(each.restarts > count for each, count in zip(states, before, strict=True)),
        f"{running.pod.name} is started again",
    )
    await settled(fleet)


async def kill_each_kind(fleet: Fleet) -> str:
    """After `kill -9` in one pod of each workload, its containers run again and a prompt of before hits.

    No container of another workload restarts.
    """
    verify = await remembered(fleet, "kill")
    killed = []
    for owner in sorted({each.pod.owner for each in fleet.cluster.running.values()}):
        others = restarts(fleet, besides=owner)
        await kill_and_wait(fleet, fleet.cluster.of(owner)[-1])
        await verify()
        assert restarts(fleet, besides=owner) == others, f"killing {owner} restarted another workload"
        killed.append(owner.partition("/")[2].removeprefix("demo-lmkv-"))
    return ", ".join(killed)


async def restart_alone(fleet: Fleet) -> str:
    """In a pod with engine and node, each restarts without the other, and a prompt of before hits."""
    verify = await remembered(fleet, "alone")
    running = fleet.engines()[-1]
    for name, other in (("engine", "node"), ("node", "engine")):
        before = running.containers[other].restarts
        await kill_and_wait(fleet, running, name)
        await verify()
        assert running.containers[other].restarts == before, f"killing {name} restarted {other}"
    return "engine, node"


async def rolling_restart(fleet: Fleet) -> str:
    """Every workload is replaced pod by pod in the order of upgrades; a prompt of before still hits at every engine.

    The new pods use the other channel.
    No container of another workload restarts, and all stop within their grace periods.
    """
    return await replace_pods(fleet, owners(fleet))


async def replace_nodes(fleet: Fleet) -> str:
    """As `rolling_restart`, but only nodes are replaced, by those with the other channel."""
    return await replace_pods(fleet, [NODES])


async def replace_pods(fleet: Fleet, chosen: Sequence[str]) -> str:
    """Replaces these workloads by those with the other channel; what was stored before still hits."""
    verify = await remembered(fleet, "rolling")
    began = asyncio.get_running_loop().time()
    await fleet.change_channel()
    for owner in chosen:
        others = restarts(fleet, besides=owner)
        async for _, stop in fleet.cluster.roll(owner, of_manifests(fleet)):
            assert_in_time(stop, owner)
        await settled(fleet)
        await verify()
        assert restarts(fleet, besides=owner) == others, f"replacing {owner} restarted another workload"
    return f"{asyncio.get_running_loop().time() - began:.0f} s"


def of_manifests(fleet: Fleet) -> Change:
    specs = {pod.owner: pod.spec for pod in pods(fleet.cluster.manifests, fleet.cluster.hosts)}

    def changed(pod: Pod) -> Pod:
        return dataclasses.replace(pod, spec=specs[pod.owner])

    return changed


def owners(fleet: Fleet) -> list[str]:
    """The workloads in the order of upgrades."""
    return sorted({each.pod.owner for each in fleet.cluster.running.values()}, key=rank)


def rank(owner: str) -> tuple[int, str]:
    """The order of upgrades: coordinators, nodes, engines, proxies."""
    order = [COORDINATOR, NODES, "", PROXY]
    return (order.index(owner) if owner in order else 2, owner)


async def drain_before_stop(fleet: Fleet) -> str:
    """A pod that is deleted first copies what only its node holds, within its grace period; it hits at the other."""
    return await replace_drained(fleet, unchanged)


async def drain_before_change(fleet: Fleet) -> str:
    """As `drain_before_stop`; the pod is then replaced by one with the other channel."""
    await fleet.change_channel()
    return await replace_drained(fleet, of_manifests(fleet))


async def replace_drained(fleet: Fleet, change: Change) -> str:
    """Deletes a pod, checks that its chunks were copied and hit at the other, and replaces it."""
    chunks = await known(fleet, "before the stop")
    await until_held(fleet, chunks, chunks.source)
    (running,) = (
        each
        for each in fleet.cluster.running.values()
        if has_node(each) and chunks.source in (each.pod.name, each.pod.host)
    )
    stop = await fleet.cluster.delete(running)
    code, output = stop.hooks["node"]
    assert code == 0, output
    assert_in_time(stop, running.pod.owner)
    await until_held(fleet, chunks, chunks.destination)
    await chunks.check_loads()
    await fleet.cluster.start(change(running.pod))
    await settled(fleet)
    return f"{chunks.count} chunks"


async def disk_outlives_memory(fleet: Fleet) -> str:
    """What a host's disk holds hits after the host has lost its memory, as when it restarts."""
    host, first = fleet.cluster.hosts[0], 50_000

    async def written(at_least: int = 0) -> int:
        """The number of chunks on disk, once it has those in memory too."""
        count = 0

        async def reached() -> bool:
            nonlocal count
            tiers = (await fleet.tiers()).get(host, {})
            count = tiers.get("disk", 0)
            return count >= max(at_least, tiers.get("host", 0))

        await fleet.cluster.wait_for(reached, f"the chunks of {host} are on its disk")
        return count

    before = await written()
    await store_at(fleet.cluster, host, first, CHUNKS)
    await written(before + CHUNKS)
    (running,) = (each for each in fleet.cluster.of(NODES) if each.pod.host == host)
    await fleet.cluster.delete(running, force=True)
    shutil.rmtree(fleet.cluster.places.of_host(host, "/dev/shm"))
    await fleet.cluster.start(running.pod)
    await settled(fleet)
    elsewhere = await load_at(fleet.cluster, host, first, CHUNKS)
    assert elsewhere == {"disk": CHUNKS}, elsewhere
    return f"{CHUNKS} chunks"


async def folder_outlives_memory(fleet: Fleet) -> str:
    """What a host has written to the folder that hosts share hits at another after the first lost its memory."""
    (first, second), number = fleet.cluster.hosts, 60_000
    await store_at(fleet.cluster, first, number, CHUNKS)
    names = {key.hex() for key in chunk_keys(*range(number, number + CHUNKS))}

    async def written() -> bool:
        return names <= {file.name for file in fleet.cluster.places.of_claim("kv").rglob("*")}

    await fleet.cluster.wait_for(written, f"the chunks of {first} are in the shared folder")
    (running,) = (each for each in fleet.cluster.of(NODES) if each.pod.host == first)
    await fleet.cluster.delete(running, force=True)
    shutil.rmtree(fleet.cluster.places.of_host(first, "/dev/shm"))
    await fleet.cluster.start(running.pod)
    await settled(fleet)
    elsewhere = await load_at(fleet.cluster, second, number, CHUNKS)
    assert elsewhere == {"remote": CHUNKS}, elsewhere
    return f"{CHUNKS} chunks"
