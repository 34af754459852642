"""Translates manifests to what Podman runs: what Kubernetes' controllers and kubelets decide, as data.

Dictionaries in; pods, folders, files, arguments and probes out. Nothing is run here. What a manifest asks for and this
module does not know is refused; `NOT_TRIED` lists what is known and has no effect on one machine.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]

NOT_TRIED = {
    "pod": {
        *("serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "imagePullSecrets"),
        *("topologySpreadConstraints", "affinity", "nodeSelector", "tolerations", "priorityClassName"),
    },
    "container": {"imagePullPolicy", "ports"},
    "volume": {"sizeLimit"},
    "resources": {"requests"},
}
"""What pods ask for that has no effect here: scheduling, accounts, quotas of volumes."""
TRANSLATED = {
    "pod": {
        *("initContainers", "containers", "volumes", "securityContext", "terminationGracePeriodSeconds"),
        "restartPolicy",
    },
    "container": {
        *("name", "image", "command", "args", "env", "resources", "securityContext", "volumeMounts", "restartPolicy"),
        *("startupProbe", "livenessProbe", "readinessProbe", "lifecycle"),
    },
}
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment", "Pod")


class Unsupported(ValueError):
    """A manifest asks for what cannot be tried with Podman."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """A pod as a controller makes it and a scheduler places it."""

    name: str
    owner: str
    """Kind and name of the controller, or of the pod itself: `StatefulSet/demo-lmkv-coordinator`."""
    host: str
    namespace: str
    labels: Mapping[str, str]
    spec: Manifest
    subdomain: str = ""
    """The service that gives each pod of a StatefulSet a name."""

    @property
    def containers(self) -> list[Manifest]:
        """Its containers, without those of its start."""
        return list(self.spec["containers"])

    @property
    def sidecars(self) -> list[Manifest]:
        """Init containers that run as long as the pod."""
        return [each for each in self.spec.get("initContainers", ()) if each.get("restartPolicy") == "Always"]

    @property
    def initial(self) -> list[Manifest]:
        """Init containers in the order of their start: sidecars and those that end."""
        return list(self.spec.get("initContainers", ()))

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the named ports of its containers."""
        containers = [*self.containers, *self.sidecars]
        return {each["name"]: int(each["containerPort"]) for item in containers for each in item.get("ports", ())}

    @property
    def grace_seconds(self) -> int:
        """The time from its deletion to `kill -9`."""
        return int(self.spec.get("terminationGracePeriodSeconds", 30))


def pods(manifests: Sequence[Manifest], hosts: Sequence[str]) -> list[Pod]:
    """The pods of all workloads, spread over hosts in turn, those of a DaemonSet one on each. Raises `Unsupported`."""
    found = [pod for manifest in manifests for pod in pods_of(manifest, hosts)]
    for pod in found:
        check(pod)
    return found


def pods_of(manifest: Manifest, hosts: Sequence[str]) -> Iterator[Pod]:
    """The pods of one workload; none of other manifests."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if kind not in WORKLOADS:
        if "template" in (found := manifest.get("spec", {})) or "leaderWorkerTemplate" in found:
            raise Unsupported(f"{name}: {kind}")
        return
    template = manifest if kind == "Pod" else manifest["spec"]["template"]
    if kind == "DaemonSet":
        placed = [(f"{name}-{host}", host) for host in hosts]
    elif kind == "Pod":
        placed = [(name, hosts[0])]
    else:
        count = manifest["spec"].get("replicas", 1)
        placed = [(f"{name}-{index}", hosts[index % len(hosts)]) for index in range(count)]
    for pod_name, host in placed:
        yield Pod(
            name=pod_name,
            owner=f"{kind}/{name}",
            host=host,
            namespace=manifest["metadata"]["namespace"],
            labels=template["metadata"]["labels"],
            spec=template["spec"],
            subdomain=manifest["spec"].get("serviceName", "") if kind == "StatefulSet" else "",
        )


def check(pod: Pod) -> None:
    """Raises `Unsupported` if the pod asks for what this module does not know."""
    refuse_unknown("pod", pod.spec, pod.name)
    for container in (*pod.initial, *pod.containers):
        refuse_unknown("container", container, f"{pod.name}/{container['name']}")


def refuse_unknown(what: str, spec: Manifest, where: str) -> None:
    """Raises `Unsupported` for fields that are in neither list."""
    if unknown := spec.keys() - TRANSLATED[what] - NOT_TRIED[what]:
        raise Unsupported(f"{where}: {', '.join(sorted(unknown))}")


# Volumes


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a volume."""

    content: bytes
    mode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """A folder of this machine that is a volume."""

    path: Path
    files: Mapping[str, File] = field(default_factory=dict)
    group: int | None = None
    """The group that owns it; None: root's, as folders of hosts are."""
    keep: bool = False
    """Whether it outlives the pod."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Where volumes lie on this machine: on disk, or in memory."""

    disk: Path
    memory: Path

    def of_host(self, host: str, path: str) -> Path:
        """A folder of a host; hosts have memory in /dev/shm."""
        root = self.memory if path.startswith("/dev/shm") else self.disk
        return root / "hosts" / host / path.strip("/")

    def of_claim(self, name: str) -> Path:
        """A volume that pods of all hosts mount."""
        return self.disk / "claims" / name

    def of_pod(self, pod: str, volume: str, *, in_memory: bool) -> Path:
        """A volume that ends with its pod."""
        return (self.memory if in_memory else self.disk) / "pods" / pod / volume


def folders(pod: Pod, manifests: Sequence[Manifest], places: Places) -> dict[str, Folder]:
    """The folder of each volume of a pod, by the volume's name. Raises `Unsupported`, `LookupError`."""
    group = pod.spec.get("securityContext", {}).get("fsGroup")
    return {volume["name"]: folder_of(volume, pod, manifests, places, group) for volume in pod.spec.get("volumes", ())}


def folder_of(volume: Manifest, pod: Pod, manifests: Sequence[Manifest], places: Places, group: int | None) -> Folder:
    (kind,) = volume.keys() - {"name"}
    source = volume[kind]
    if kind == "hostPath":
        return Folder(path=places.of_host(pod.host, source["path"]), keep=True)
    if kind == "persistentVolumeClaim" and is_shared(source["claimName"], manifests):
        return Folder(path=places.of_claim(source["claimName"]), group=group, keep=True)
    in_memory = kind == "emptyDir" and source.get("medium") == "Memory"
    path = places.of_pod(pod.name, volume["name"], in_memory=in_memory)
    if kind == "emptyDir" and source.get("medium", "") in ("", "Memory"):
        return Folder(path=path, group=group)
    if kind == "configMap":
        data = {key: text.encode() for key, text in find(manifests, "ConfigMap", source["name"])["data"].items()}
    elif kind == "secret":
        data = secret_data(find(manifests, "Secret", source["secretName"]))
    else:
        raise Unsupported(f"{pod.name}: volume {volume['name']}: {kind}: {source}")
    mode = source.get("defaultMode", 0o644)
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    # The kubelet adds the group's right to read.
    files = {item["path"]: File(content=data[item["key"]], mode=mode | (0o040 if group else 0)) for item in items}
    return Folder(path=path, files=files, group=group)


def is_shared(claim: str, manifests: Sequence[Manifest]) -> bool:
    """Whether a claim is one of the manifests, and its volume one of all hosts."""
    claims = [each for each in manifests if each["kind"] == "PersistentVolumeClaim"]
    return any(each["metadata"]["name"] == claim and "ReadWriteMany" in each["spec"]["accessModes"] for each in claims)


def secret_data(secret: Manifest) -> dict[str, bytes]:
    """The content of a secret."""
    return {key: base64.b64decode(text) for key, text in secret["data"].items()}


def find(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    for manifest in manifests:
        if manifest["kind"] == kind and manifest["metadata"]["name"] == name:
            return manifest
    raise LookupError(f"no {kind} {name}: Kubernetes would not start its pods")


# Containers


def environment(container: Manifest, pod: Pod, address: str, manifests: Sequence[Manifest]) -> dict[str, str]:
    """A container's variables. Raises `Unsupported`, `LookupError`."""
    fields = {
        "metadata.name": pod.name,
        "metadata.namespace": pod.namespace,
        "spec.nodeName": pod.host,
        "status.podIP": address,
    }
    found: dict[str, str] = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if not source:
            found[variable["name"]] = expand(variable.get("value", ""), found)
        elif path := source.get("fieldRef", {}).get("fieldPath"):
            if path not in fields:
                raise Unsupported(f"{pod.name}: field {path}")
            found[variable["name"]] = fields[path]
        else:
            (reference,) = source.values()
            text = referenced(source, manifests)
            if text is not None:
                found[variable["name"]] = text
            elif not reference.get("optional"):
                raise LookupError(f"{pod.name}: {reference} does not exist: Kubernetes would not start it")
    return found


def referenced(source: Manifest, manifests: Sequence[Manifest]) -> str | None:
    """The value of a key of a ConfigMap or Secret; None: there is none."""
    (kind, reference), *_ = source.items()
    try:
        if kind == "configMapKeyRef":
            text: str | None = find(manifests, "ConfigMap", reference["name"])["data"].get(reference["key"])
            return text
        if kind == "secretKeyRef":
            data = secret_data(find(manifests, "Secret", reference["name"]))
            return data[reference["key"]].decode() if reference["key"] in data else None
    except LookupError:
        return None
    raise Unsupported(f"variable from {kind}")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces `$(NAME)` as Kubernetes does: `$$` is a `$`, unknown names stay."""
    return re.sub(
        r"\$(\$|\(([A-Za-z_][\w.-]*)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        text,
    )


def bytes_of(quantity: str | int) -> int:
    """Bytes of a quantity of memory: 512Mi, 2Gi, 1000000."""
    number, unit = re.fullmatch(r"([0-9.]+)([KMGT]i?)?", str(quantity)).groups()  # type: ignore[union-attr]
    power = "KMGT".index(unit[0]) + 1 if unit else 0
    return int(float(number) * (1024 if unit and unit.endswith("i") else 1000) ** power)


def cpus_of(quantity: str | float) -> float:
    """Processors of a quantity: 500m, 2."""
    text = str(quantity)
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def container_arguments(
    pod: Pod,
    container: Manifest,
    *,
    podman_pod: str,
    address: str,
    volumes: Mapping[str, Folder],
    manifests: Sequence[Manifest],
) -> list[str]:
    """The arguments of `podman create` for a container of a pod."""
    variables = environment(container, pod, address, manifests)
    words = ["--pod", podman_pod, "--name", f"{podman_pod}-{container['name']}", "--pull", "never", "--restart", "no"]
    words += security_arguments(pod.spec.get("securityContext", {}), container.get("securityContext", {}))
    words += resource_arguments(container.get("resources", {}))
    for name, value in variables.items():
        words += ["--env", f"{name}={value}"]
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            raise Unsupported(f"{pod.name}: no volume {mount['name']}: claims of templates are not made")
        options = ":ro" if mount.get("readOnly") else ""
        words += ["--volume", f"{volumes[mount['name']].path}:{mount['mountPath']}{options}"]
    if "command" in container:
        words += ["--entrypoint", json.dumps([expand(word, variables) for word in container["command"]])]
    return [*words, container["image"], *(expand(word, variables) for word in container.get("args", ()))]


def security_arguments(of_pod: Manifest, of_container: Manifest) -> list[str]:
    """Flags for users, groups, capabilities and the root file system. Raises `Unsupported`."""
    context = {**of_pod, **of_container}
    known = {
        *("runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"),
        *("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"),
    }
    if unknown := context.keys() - known:
        raise Unsupported(f"security context: {', '.join(sorted(unknown))}")
    user = context.get("runAsUser")
    if context.get("runAsNonRoot") and user == 0:
        raise Unsupported("runAsNonRoot with user 0: Kubernetes would not start it")
    if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") != "RuntimeDefault":
        raise Unsupported("seccomp profiles other than RuntimeDefault")
    words: list[str] = []
    if user is not None:
        words += ["--user", f"{user}:{context.get('runAsGroup', user)}"]
    if context.get("fsGroup") is not None:
        words += ["--group-add", str(context["fsGroup"])]
    if context.get("readOnlyRootFilesystem"):
        words += ["--read-only", "--read-only-tmpfs=false"]
    if context.get("allowPrivilegeEscalation") is False:
        words += ["--security-opt", "no-new-privileges"]
    capabilities = context.get("capabilities") or {}
    for flag in ("drop", "add"):
        words += [word for name in capabilities.get(flag, ()) for word in (f"--cap-{flag}", name)]
    return words


def resource_arguments(resources: Manifest) -> list[str]:
    """Flags for limits. Raises `Unsupported` for devices."""
    words: list[str] = []
    for resource, amount in resources.get("limits", {}).items():
        if resource == "memory":
            words += ["--memory", str(bytes_of(amount)), "--memory-swap", str(bytes_of(amount))]
        elif resource == "cpu":
            words += ["--cpus", str(cpus_of(amount))]
        else:
            raise Unsupported(f"resource {resource}")
    return words
