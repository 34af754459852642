"""Runs one pod with Podman as a kubelet does: init containers, probes, restarts, hooks and the grace period."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.podman import PREFIX, Podman, PodmanError
from tests.cluster.probes import Probe, probe, succeeds
from tests.cluster.translation import Folder, Manifest, Places, Pod, container_arguments, folders

CRASH_DELAY_SECONDS = 10.0
"""Pause before each restart of a container but the first."""
START_SECONDS = 600.0
"""Time in which a sidecar must start. It may restart meanwhile."""
KILLED = 137
"""Exit code of a process that `kill -9` ended."""


@dataclass(kw_only=True, slots=True)
class ContainerState:
    """What is known of a container that runs as long as its pod."""

    spec: Manifest
    name: str
    is_started: bool = False
    is_ready: bool = False
    restarts: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The network of pods."""

    name: str
    gateway: str
    search: Sequence[str]


@dataclass(kw_only=True, slots=True)
class Stop:
    """How the containers of a pod stopped."""

    hooks: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Exit code and output of the command of each `preStop` hook, by container."""
    killed: list[str] = field(default_factory=list)
    """Containers that ran until the end of the grace period."""


class RunningPod:
    """A pod that runs. `changed` is called when it becomes ready or stops being so.

    `joins` is awaited when its network is made, before a container runs; `leaves` before its network is removed.
    """

    def __init__(
        self,
        pod: Pod,
        address: str,
        *,
        podman: Podman,
        network: Network,
        manifests: Sequence[Manifest],
        places: Places,
        start_task: Callable[[Coroutine[Any, Any, None]], None],
        logs: Path,
        changed: Callable[[], None],
        joins: Callable[[RunningPod], Awaitable[None]] | None = None,
        leaves: Callable[[RunningPod], Awaitable[None]] | None = None,
    ) -> None:
        self.pod = pod
        self.address = address
        self.podman_name = f"{PREFIX}-{pod.name}"
        self.volumes: Mapping[str, Folder] = folders(pod, manifests, places)
        self.containers: dict[str, ContainerState] = {}
        self._podman = podman
        self._network = network
        self._manifests = manifests
        self._start_task = start_task
        self._logs = logs
        self._changed = changed
        self._joins = joins
        self._leaves = leaves
        self._is_ending = False

    @property
    def is_ready(self) -> bool:
        """Whether services may send requests to it."""
        expected = len(self.pod.containers) + len(self.pod.sidecars)
        ready = [each for each in self.containers.values() if each.is_ready]
        return not self._is_ending and len(ready) == expected

    async def start(self) -> None:
        """Makes the pod and starts its containers in order. Raises `PodmanError`."""
        await self.make()
        for container in self.pod.initial:
            if container.get("restartPolicy") == "Always":
                await self._until_started(await self._supervise(container))
            else:
                await self._run_to_end(container)
        for container in self.pod.containers:
            await self._supervise(container)

    async def _until_started(self, state: ContainerState) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await state.started.wait()
        except TimeoutError:
            raise PodmanError(f"{state.name} has not started within {START_SECONDS:.0f} s") from None

    async def run_to_end(self) -> tuple[int, str]:
        """Runs a pod that ends, such as that of `helm test`; the exit code and output of its container."""
        try:
            await self.make()
            (container,) = self.pod.containers
            return await self._podman.run("start", "--attach", await self._create(container))
        finally:
            await self.remove()

    async def make(self) -> None:
        """Makes the folders, the network namespace and the address of the pod; starts no container."""
        for folder in self.volumes.values():
            make_folder(folder)
        words = ["--name", self.podman_name, "--label", f"{PREFIX}={self.pod.namespace}", "--hostname", self.pod.name]
        words += ["--network", self._network.name, "--ip", self.address, "--dns", self._network.gateway]
        words += [word for domain in self._network.search for word in ("--dns-search", domain)]
        await self._podman("pod", "create", *words, "--dns-option", "ndots:5", "--no-hosts")
        if self._joins:
            await self._podman("pod", "start", self.podman_name)
            await self._joins(self)

    async def network_pid(self) -> int:
        """A process in its network namespace: that of the container that only holds it."""
        container = await self._podman("pod", "inspect", "--format", "{{.InfraContainerID}}", self.podman_name)
        return int(await self._podman("inspect", "--format", "{{.State.Pid}}", container))

    async def remove(self) -> None:
        """Removes the pod and the volumes that end with it; its containers are killed."""
        if self._leaves:
            await self._leaves(self)
        await self._podman("pod", "rm", "--force", "--time", "0", self.podman_name, check=False)
        for folder in self.volumes.values():
            if not folder.keep:
                shutil.rmtree(folder.path, ignore_errors=True)

    async def _create(self, container: Manifest) -> str:
        """Creates a container and returns its name."""
        words = container_arguments(
            self.pod,
            container,
            podman_pod=self.podman_name,
            address=self.address,
            volumes=self.volumes,
            manifests=self._manifests,
        )
        await self._podman("create", "--label", f"{PREFIX}={self.pod.namespace}", *words)
        return f"{self.podman_name}-{container['name']}"

    async def _run_to_end(self, container: Manifest) -> None:
        name = await self._create(container)
        code, output = await self._podman.run("start", "--attach", name)
        if code:
            raise PodmanError(f"{name} ended with exit code {code}: {output}")

    async def _supervise(self, container: Manifest) -> ContainerState:
        name = await self._create(container)
        state = self.containers[container["name"]] = ContainerState(spec=container, name=name)
        self._start_task(self._keep_running(state))
        return state

    async def _keep_running(self, state: ContainerState) -> None:
        """Starts a container, again whenever it ends, until the pod ends."""
        while not self._is_ending:
            if state.restarts > 1:
                await asyncio.sleep(CRASH_DELAY_SECONDS)
            await self._podman("start", state.name, check=not state.restarts)
            probing = asyncio.create_task(self._probe(state))
            try:
                await self._ended(state.name)
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
                state.is_started = state.is_ready = False
                self._changed()
            state.restarts += 1

    async def _ended(self, name: str) -> None:
        """Waits until the container's process has ended, without a process that polls."""
        pid = int(await self._podman("inspect", "--format", "{{.State.Pid}}", name, check=False) or 0)
        try:
            descriptor = os.pidfd_open(pid) if pid else None
        except ProcessLookupError:
            descriptor = None
        if descriptor is not None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        await self._podman("wait", name, check=False)

    async def _probe(self, state: ContainerState) -> None:
        """Runs the probes of a container; a failure of the first two kinds ends its process."""
        if (startup := probe(state.spec, "startupProbe")) and not await self._first_success(state, startup):
            await self._stop_container(state, f"no start within {startup.failure_threshold} probes")
            return
        state.is_started = True
        state.started.set()
        readiness, liveness = probe(state.spec, "readinessProbe"), probe(state.spec, "livenessProbe")
        if readiness is None:
            self._set_ready(state, True)
        async with asyncio.TaskGroup() as probes:
            if readiness:
                probes.create_task(self._watch_readiness(state, readiness))
            if liveness:
                probes.create_task(self._watch_liveness(state, liveness))

    async def _first_success(self, state: ContainerState, spec: Probe) -> bool:
        await asyncio.sleep(spec.delay_seconds)
        for _ in range(spec.failure_threshold):
            if await self.answers(state, spec):
                return True
            await asyncio.sleep(spec.period_seconds)
        return False

    async def _watch_readiness(self, state: ContainerState, spec: Probe) -> None:
        await asyncio.sleep(spec.delay_seconds)
        failures = 0
        while True:
            failures = 0 if await self.answers(state, spec) else failures + 1
            if failures == 0 or failures >= spec.failure_threshold:
                self._set_ready(state, failures == 0)
            await asyncio.sleep(spec.period_seconds)

    async def _watch_liveness(self, state: ContainerState, spec: Probe) -> None:
        await asyncio.sleep(spec.delay_seconds)
        failures = 0
        while failures < spec.failure_threshold:
            failures = 0 if await self.answers(state, spec) else failures + 1
            await asyncio.sleep(spec.period_seconds)
        await self._stop_container(state, f"{failures} liveness probes failed")

    def _set_ready(self, state: ContainerState, ready: bool) -> None:
        if state.is_ready != ready:
            state.is_ready = ready
            self._changed()

    async def _stop_container(self, state: ContainerState, reason: str) -> None:
        print(f"{state.name}: stopped: {reason}", flush=True)
        await self._podman("stop", "--time", str(self.pod.grace_seconds), state.name, check=False)

    async def answers(self, state: ContainerState, spec: Probe) -> bool:
        """Whether a probe succeeds."""
        if spec.kind != "exec":
            return await succeeds(spec, self.address)
        try:
            async with asyncio.timeout(spec.timeout_seconds):
                code, _ = await self._podman.run("exec", state.name, *spec.command)
        except TimeoutError:
            return False
        return code == 0

    async def execute(self, container: str, *command: str) -> tuple[int, str]:
        """Runs a command in a container; exit code and output."""
        return await self._podman.run("exec", self.containers[container].name, *command)

    async def kill(self, *names: str) -> None:
        """`kill -9` of every process of these containers, or of all; they are then started again."""
        for state in [self.containers[name] for name in names] or self.containers.values():
            await self._podman("kill", "--signal", "KILL", state.name)

    async def delete(self, *, force: bool = False) -> Stop:
        """Stops the pod within its grace period: hooks, SIGTERM, sidecars last; with `force` at once."""
        self._is_ending = True
        self._changed()
        stop = Stop()
        if not force:
            deadline = time.monotonic() + self.pod.grace_seconds
            main = {each["name"] for each in self.pod.containers}
            states = self.containers.values()
            # Hooks of sidecars run while the other containers stop.
            hooks = asyncio.gather(*(self._run_hook(each, stop) for each in states if each.spec["name"] not in main))
            await asyncio.gather(*(self._end(each, deadline, stop) for each in states if each.spec["name"] in main))
            await hooks
            for each in reversed([each for each in states if each.spec["name"] not in main]):
                await self._stop_by(each, deadline, stop)
        await self.save_logs()
        await self.remove()
        return stop

    async def _end(self, state: ContainerState, deadline: float, stop: Stop) -> None:
        await self._run_hook(state, stop)
        await self._stop_by(state, deadline, stop)

    async def _stop_by(self, state: ContainerState, deadline: float, stop: Stop) -> None:
        seconds = max(2, int(deadline - time.monotonic()))  # a hook that took all the time leaves two seconds
        await self._podman("stop", "--time", str(seconds), state.name, check=False)
        code = await self._podman("inspect", "--format", "{{.State.ExitCode}}", state.name, check=False)
        if code == str(KILLED):
            stop.killed.append(state.spec["name"])

    async def _run_hook(self, state: ContainerState, stop: Stop) -> None:
        hook = state.spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        elif "exec" in hook:
            stop.hooks[state.spec["name"]] = await self._podman.run("exec", state.name, *hook["exec"]["command"])

    async def logs(self) -> dict[str, str]:
        """The output of each container so far."""
        return {name: (await self._podman.run("logs", state.name))[1] for name, state in self.containers.items()}

    async def save_logs(self) -> None:
        """Appends the output of its containers to files in the folder of logs."""
        for name, text in (await self.logs()).items():
            with (self._logs / f"{self.pod.name}-{name}.log").open("a", encoding="utf-8") as log:
                log.write(text + "\n")


def make_folder(folder: Folder) -> None:
    """Makes the folder of a volume with its files, and gives it to its group as a kubelet does."""
    folder.path.mkdir(parents=True, exist_ok=True)
    if folder.keep:
        if folder.group is not None:  # a claim's
            os.chown(folder.path, -1, folder.group)
            folder.path.chmod(0o2775)
        return
    if not folder.files:
        folder.path.chmod(0o777)
    for name, file in folder.files.items():
        path = folder.path / name
        path.write_bytes(file.content)
        path.chmod(file.mode)
        if folder.group is not None:
            os.chown(path, -1, folder.group)
    if folder.group is not None:
        os.chown(folder.path, -1, folder.group)
        folder.path.chmod(folder.path.stat().st_mode | stat.S_ISGID)
