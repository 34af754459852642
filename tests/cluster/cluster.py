"""A cluster in miniature on this machine: hosts as folders, a network with DNS, and controllers that replace pods."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import itertools
import json
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import dns.exception

from tests.cluster.firewall import Firewall
from tests.cluster.kubelet import Network, RunningPod, Stop
from tests.cluster.names import Endpoint, answer, names, search_domains
from tests.cluster.podman import PREFIX, Podman
from tests.cluster.policies import Party
from tests.cluster.translation import Manifest, Places, Pod, find, pods

DOMAIN = "cluster.local"
IP_FREEBIND = 15
"""Linux's socket option to bind an address that no interface has yet: bridges come with their first pod."""
DNS_NAMESPACE = "kube-system"
FIRST_ADDRESS = 10
POLL_SECONDS = 0.5

Change = Callable[[Pod], Pod]
"""What differs between a pod and the one that takes its place."""


def unchanged(pod: Pod) -> Pod:
    """No difference."""
    return pod


class Nameserver(asyncio.DatagramProtocol):
    """Answers the DNS queries of pods."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Called by asyncio for each query."""
        assert self._transport
        with contextlib.suppress(dns.exception.DNSException):
            self._transport.sendto(answer(data, self.known), addr)


class Cluster:
    """Runs the pods of manifests. Leaving the context removes everything that it made, also after an error."""

    def __init__(self, manifests: Sequence[Manifest], hosts: Sequence[str], logs: Path) -> None:
        self.manifests = list(manifests)
        self.hosts = hosts
        self.logs = logs
        self.running: dict[str, RunningPod] = {}
        """The pods that run, by name."""
        self._beside: dict[str, list[str]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._nameserver = Nameserver()
        self._firewall: Firewall | None = None
        """None: the manifests have no network policies."""
        self._generation = itertools.count(2)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            disk = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-", ignore_cleanup_errors=True))
            )
            memory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, memory, ignore_errors=True)
            for folder in (disk, memory):
                folder.chmod(0o755)
            self.places = Places(disk=disk, memory=memory)
            self.podman = Podman(disk)
            self.logs.mkdir(parents=True, exist_ok=True)
            await self.podman.remove_all()
            stack.push_async_callback(self.podman.remove_all)
            await self._make_network(stack)
            self._tasks = await stack.enter_async_context(Supervision())
            stack.push_async_callback(self._save_logs)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def _make_network(self, stack: contextlib.AsyncExitStack) -> None:
        await self.podman("network", "create", "--disable-dns", "--label", f"{PREFIX}=network", PREFIX)
        (described,) = json.loads(await self.podman("network", "inspect", PREFIX))
        subnet = described["subnets"][0]
        self._addresses = itertools.islice(ipaddress.ip_network(subnet["subnet"]).hosts(), FIRST_ADDRESS, None)
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        server.bind((subnet["gateway"], 53))
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self._nameserver, sock=server)
        stack.callback(transport.close)
        namespace = next(each["metadata"]["namespace"] for each in self.manifests)
        gateway = subnet["gateway"]
        self._network = Network(name=PREFIX, gateway=gateway, search=search_domains(namespace, DOMAIN))
        if policies := policies_of(self.manifests):
            nameserver = Party(namespace=DNS_NAMESPACE, labels={}, address=gateway)
            self._firewall = Firewall(policies, gateway, [nameserver])

    async def apply(self, manifests: Sequence[Manifest]) -> None:
        """Replaces the manifests: policies change at once, pods when they are replaced."""
        self.manifests = list(manifests)
        if self._firewall:
            await self._firewall.replace(policies_of(self.manifests))

    async def _save_logs(self) -> None:
        for running in self.running.values():
            await running.save_logs()

    # Pods

    def of(self, owner: str) -> list[RunningPod]:
        """The pods of a workload in order: `StatefulSet/demo-lmkv-coordinator`."""
        return [running for running in self.running.values() if running.pod.owner == owner]

    async def start(self, pod: Pod) -> RunningPod:
        """Starts a pod; does not wait until it is ready."""
        running = self._pod(pod)
        self.running[pod.name] = running
        await running.start()
        return running

    async def run_to_end(self, pod: Pod) -> tuple[int, str]:
        """Exit code and output of a pod that ends."""
        return await self._pod(pod).run_to_end()

    def _pod(self, pod: Pod) -> RunningPod:
        return RunningPod(
            pod,
            str(next(self._addresses)),
            podman=self.podman,
            network=self._network,
            manifests=self.manifests,
            places=self.places,
            start_task=self._tasks.start,
            logs=self.logs,
            changed=self._update_names,
            joins=self._joins if self._firewall else None,
            leaves=self._leaves if self._firewall else None,
        )

    async def _joins(self, running: RunningPod) -> None:
        assert self._firewall
        pod = running.pod
        party = Party(namespace=pod.namespace, labels=pod.labels, address=running.address, ports=pod.ports)
        await self._firewall.add(running.podman_name, party, await running.network_pid())

    async def _leaves(self, running: RunningPod) -> None:
        assert self._firewall
        await self._firewall.remove(running.podman_name)

    @contextlib.asynccontextmanager
    async def bare_pod(self, name: str, labels: Mapping[str, str]) -> AsyncIterator[RunningPod]:
        """A pod without containers, which has a network namespace and an address."""
        namespace = next(each["metadata"]["namespace"] for each in self.manifests)
        spec: Manifest = {"containers": []}
        pod = Pod(name=name, owner=f"Pod/{name}", host=self.hosts[0], namespace=namespace, labels=labels, spec=spec)
        running = self._pod(pod)
        try:
            await running.make()
            yield running
        finally:
            await running.remove()

    async def start_all(self, change: Change = unchanged) -> None:
        """Starts all pods that do not end by themselves, at once, and waits until they are ready."""
        chosen = [pod for pod in pods(self.manifests, self.hosts) if pod.spec.get("restartPolicy") != "Never"]
        started = await asyncio.gather(*(self.start(change(pod)) for pod in chosen))
        await self.wait_ready(started)

    async def wait_ready(self, chosen: Iterable[RunningPod], timeout_seconds: float = 600.0) -> None:
        """Waits until these pods are ready. Raises `AssertionError` with their logs if they are not in time."""
        chosen = list(chosen)
        await self.wait_until(lambda: all(each.is_ready for each in chosen), "all pods are ready", timeout_seconds)

    async def wait_until(self, condition: Callable[[], object], what: str, timeout_seconds: float = 60.0) -> None:

        async def ask() -> object:
            return condition()

        await self.wait_for(ask, what, timeout_seconds)

    async def wait_for(
        self,
        condition: Callable[[], Awaitable[object]],
        what: str,
        timeout_seconds: float = 60.0,
        error: type[AssertionError] = AssertionError,
    ) -> None:
        """Waits for a condition that is awaited. Raises `error` if it is not met in time."""
        deadline = time.monotonic() + timeout_seconds
        while not await condition():
            not_ready = [each.pod.name for each in self.running.values() if not each.is_ready]
            if time.monotonic() > deadline:
                raise error(f"not within {timeout_seconds:.0f} s: {what}; not ready: {not_ready}")
            await asyncio.sleep(POLL_SECONDS)

    async def delete(self, running: RunningPod, *, force: bool = False) -> Stop:
        stop = await running.delete(force=force)
        del self.running[running.pod.name]
        self._update_names()
        return stop

    async def roll(self, owner: str, change: Change = unchanged) -> AsyncIterator[tuple[RunningPod, Stop]]:
        """Replaces the pods of a workload one by one, in the order and with the pauses of its controller.

        Yields each successor once it is ready, and how its predecessor stopped. Successors have other addresses. There
        is no pause after the last one: controllers of other workloads do not wait for it.
        """
        manifest = find(self.manifests, *owner.split("/"))
        old = self.of(owner)
        for number, running in enumerate(reversed(old) if manifest["kind"] == "StatefulSet" else old):
            if number:
                await asyncio.sleep(manifest["spec"].get("minReadySeconds", 0))
            if manifest["kind"] == "Deployment":  # one more for the time being
                name = f"{manifest['metadata']['name']}-{next(self._generation)}"
                new = await self.start(dataclasses.replace(change(running.pod), name=name))
                await self.wait_ready([new])
                stop = await self.delete(running)
            else:
                stop = await self.delete(running)
                new = await self.start(change(running.pod))
                await self.wait_ready([new])
            yield new, stop

    async def run_beside(self, name: str, command: Sequence[str]) -> None:
        """Runs a program of this machine, which the fleet uses, until the context is left.

        It has an address of its own in the network of pods, and a DNS name.
        """
        address = str(next(self._addresses))
        pod = f"{PREFIX}-{name.partition('.')[0]}"
        words = ("--name", pod, "--label", f"{PREFIX}=beside", "--network", self._network.name, "--ip", address)
        await self.podman("pod", "create", *words)
        await self.podman("pod", "start", pod)
        container = await self.podman("pod", "inspect", "--format", "{{.InfraContainerID}}", pod)
        pid = await self.podman("inspect", "--format", "{{.State.Pid}}", container)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *("nsenter", f"--net=/proc/{pid}/ns/net", *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us alone
                cwd="/",
            )
        self._stack.push_async_callback(ended, process)
        self._beside[name] = [address]
        self._update_names()

    def _update_names(self) -> None:
        endpoints = [
            Endpoint(pod=each.pod, address=each.address, is_ready=each.is_ready) for each in self.running.values()
        ]
        self._nameserver.known = self._beside | names(self.manifests, endpoints, DOMAIN)


def policies_of(manifests: Iterable[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == "NetworkPolicy"]


async def ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class Supervision:
    """The tasks that watch containers: they end with their context, and an error of one ends it."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(kind, error, traceback)
