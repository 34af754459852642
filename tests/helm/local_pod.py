"""A rendered pod as processes of this host: its commands, variables, files, ports and probes, with paths moved here."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lmkv_client.demo.process import ServerProcess
from tests.helm.chart import Manifest, containers, find

BIN = Path(sys.executable).parent
ANSWER_SECONDS = 5.0
"""Timeout of requests to processes; the probes have what Kubernetes allows."""

Secrets = Mapping[str, Mapping[str, bytes]]


class LocalPod:
    """One pod at an address of loopback, with folders for volumes. Each host folder is one folder for all pods.

    `names` are hosts that its files speak of, with the addresses that they have here.
    """

    def __init__(
        self,
        pod: Manifest,
        manifests: Sequence[Manifest],
        folder: Path,
        *,
        name: str,
        ip: str = "127.0.0.1",
        secrets: Secrets | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.pod = pod
        self.name = name
        self.ip = ip
        self._manifests = manifests
        self._folder = folder / name
        self._secrets = secrets or {}
        self._names = names or {}
        self._memory = ExitStack()
        self._moved: set[Path] = set()
        self.volumes = {volume["name"]: self._volume(volume, folder) for volume in pod["spec"]["volumes"]}
        self.processes: dict[str, ServerProcess] = {}

    def _volume(self, volume: Manifest, folder: Path) -> Path:
        if "hostPath" in volume:
            place: Path = folder / "host" / volume["hostPath"]["path"].strip("/").replace("/", "-")
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            place = Path(self._memory.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        else:
            place = self._folder / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            held = find(self._manifests, f"ConfigMap/{volume['configMap']['name']}")["data"]
            for name, text in held.items():
                (place / name).write_text(text)
        elif "secret" in volume:
            secret = self._secrets[volume["secret"]["secretName"]]
            items = volume["secret"].get("items") or [{"key": key, "path": key} for key in secret]
            for item in items:
                (place / item["path"]).write_bytes(secret[item["key"]])
        return place

    def container(self, name: str) -> Manifest:
        (found,) = (each for each in containers(self.pod) if each["name"] == name)
        return found

    def command(self, name: str) -> list[str]:
        """A container's command as it stands, but for paths and names of hosts, also in the files that it reads."""
        container = self.container(name)
        for mount in container["volumeMounts"]:
            for file in self.volumes[mount["name"]].glob("*.yaml"):
                if file not in self._moved:  # a container that is started again
                    self._moved.add(file)
                    file.write_text(self.here(container, file.read_text()))
        program, *arguments = (self.here(container, word) for word in container["command"])
        return [str(BIN / program), *arguments]

    def run_pre_stop(self, name: str) -> subprocess.CompletedProcess[str]:
        """Runs a container's preStop hook in its environment, as Kubernetes does before it stops the container."""
        container = self.container(name)
        command = [self.here(container, word) for word in container["lifecycle"]["preStop"]["exec"]["command"]]
        environment = os.environ | self.environment(name) | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        seconds = self.pod["spec"]["terminationGracePeriodSeconds"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)

    def start(self, name: str) -> None:
        """Runs a container."""
        log = self._folder / f"{name}.log"
        self.processes[name] = ServerProcess(name, self.command(name), log, self.environment(name))
        self.processes[name].start()

    def environment(self, name: str) -> dict[str, str]:
        """A container's variables."""
        container = self.container(name)
        fields = {"metadata.name": self.name, "spec.nodeName": "host-1", "status.podIP": self.ip}
        environment: dict[str, str] = {}
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                text = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                reference = source["configMapKeyRef"]
                held = find(self._manifests, f"ConfigMap/{reference['name']}")["data"]
                if reference["key"] not in held:
                    assert reference["optional"], "Kubernetes does not start this container"
                    continue
                text = held[reference["key"]]
            elif "secretKeyRef" in source:
                text = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]].decode()
            else:
                text = variable["value"]
            for known, value in environment.items():
                text = text.replace(f"$({known})", value)
            environment[variable["name"]] = text
        return {name: self.here(container, text) for name, text in environment.items()}

    def here(self, container: Manifest, text: str) -> str:
        """A text with this host's paths and addresses."""
        moved = {mount["mountPath"]: str(self.volumes[mount["name"]]) for mount in container["volumeMounts"]}
        known = {**moved, **self._names}
        words = "|".join(re.escape(word) for word in sorted(known, key=len, reverse=True))
        return re.sub(rf"(?<![\w.-])({words})(?![\w.-])", lambda found: known[found[1]], text)

    def wait_probed(self, name: str) -> None:
        """Waits until the container's probes say that it is started, alive and ready. Raises `LmkvError`."""
        container, process = self.container(name), self.processes[name]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe := container.get(kind):
                process.wait_until(partial(self.answers, container, probe), f"well ({kind})", 120.0)

    def answers(self, container: Manifest, probe: Manifest) -> bool:
        """Whether a probe finds what it looks for."""
        if "grpc" in probe:
            with grpc.insecure_channel(f"{self.ip}:{probe['grpc']['port']}") as channel:
                try:
                    stub: Any = health_pb2_grpc.HealthStub(channel)
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
                except grpc.RpcError:
                    return False
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        if "tcpSocket" in probe:
            try:
                socket.create_connection((self.ip, self.port(container, probe["tcpSocket"]["port"])), 5).close()
            except OSError:
                return False
            return True
        get = probe["httpGet"]
        url = f"{get.get('scheme', 'HTTP').lower()}://{self.ip}:{self.port(container, get['port'])}{get['path']}"
        try:
            return bool(fetch(url))
        except OSError:
            return False

    def port(self, container: Manifest, port: str | int) -> int:
        numbers = {each["name"]: each["containerPort"] for each in container["ports"]}
        return numbers[port] if isinstance(port, str) else port

    def written_elsewhere(self, name: str) -> set[str]:
        """Files that a process has open for writing and that its mounts do not allow: the root is read-only."""
        writable = [self.volumes[m["name"]] for m in self.container(name)["volumeMounts"] if not m.get("readOnly")]
        found = set()
        for entry in Path(f"/proc/{self.processes[name].pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                target = entry.readlink()
                info = Path(f"/proc/{self.processes[name].pid}/fdinfo/{entry.name}").read_text()
                may_write = int(info.partition("flags:")[2].split()[0], 8) & 0o3
                is_its_own = target == self._folder / f"{name}.log" or any(map(target.is_relative_to, writable))
                if may_write and target.is_file() and not is_its_own:
                    found.add(str(target))
        return found

    def stop(self) -> None:
        """Ends what was started, within the time that the pod is given."""
        for process in reversed(self.processes.values()):
            process.stop(self.pod["spec"]["terminationGracePeriodSeconds"])
        self._memory.close()


def fetch(url: str, context: ssl.SSLContext | None = None, token: str = "") -> bytes:
    """The answer to a GET; like Kubernetes' probes, it verifies no certificate by default. Raises `OSError`."""
    if context is None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS, context=context) as answer:
        body: bytes = answer.read()
        return body
