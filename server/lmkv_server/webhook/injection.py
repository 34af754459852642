"""Adds lmkv to the pod of an engine: a pod and its additions in, the operations of a JSON patch out. Pure.

What is added depends on the role of the engine. The chart renders it by the templates of its own engines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from lmkv.errors import ConfigError

Object = Mapping[str, Any]
"""An object of the Kubernetes API, or a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Additions:
    """The parts that an engine's pod needs to use lmkv."""

    user: int
    """User of the nodes, whose sockets only this user and root can open."""
    args: tuple[str, ...]
    """Arguments of vLLM."""
    env: tuple[Object, ...]
    """Variables of the engine's container."""
    volume_mounts: tuple[Object, ...]
    """Mounts of the engine's container."""
    volumes: tuple[Object, ...]
    """Volumes of the pod."""
    init_containers: tuple[Object, ...] = ()
    """The node, if it is a sidecar."""


def read_additions(path: str) -> Mapping[str, Additions]:
    """Additions by role. Raises `ConfigError` if the file cannot be read or is not what the chart renders."""
    try:
        return msgspec.yaml.decode(Path(path).read_bytes(), type=dict[str, Additions])
    except OSError as error:
        raise ConfigError(f"pod_additions: cannot read {path}: {error.strerror}", key="pod_additions") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"pod_additions: {path} is not what the chart renders: {error}", key="pod_additions"
        ) from None


ROLE_LABEL = "lmkv/inject"
"""Label of the pods that are changed. Its value is the role of the engine."""
CONTAINER_ANNOTATION = "lmkv/container"
"""Annotation that names the container with vLLM, if that is not clear."""
DONE_ANNOTATION = "lmkv/injected"
"""Annotation of a pod that was changed: the role."""
REFUSED_ANNOTATION = "lmkv/refused"
"""Annotation of a pod that was not changed: the reason and the fix."""

CONNECTOR = "LMKVConnector"
TRANSFER_FLAG = "--kv-transfer-config"
SHELLS = frozenset({"ash", "bash", "dash", "sh", "zsh"})

Operation = dict[str, Any]


class Refusal(Exception):
    """The pod cannot use lmkv as it is. The message names the fix."""


def inject(pod: Object, additions: Mapping[str, Additions]) -> list[Operation]:
    """Returns the patch of a pod with the label `lmkv/inject`; it is empty for other pods and for changed ones.

    What the pod sets itself stays: a variable, a volume or a container of the same name. Raises `Refusal` if the engine
    would not use lmkv, or would not start.
    """
    role = pod.get("metadata", {}).get("labels", {}).get(ROLE_LABEL)
    if role is None:
        return []
    if role not in additions:
        known = ", ".join(sorted(additions))
        raise Refusal(f"the label {ROLE_LABEL} is {role!r}: set it to one of: {known}")
    added = additions[role]
    number = _engine(pod)
    container = pod["spec"]["containers"][number]
    user = _user(pod, container)
    if user not in (None, 0, added.user) and not added.init_containers:
        raise Refusal(
            f"container {container['name']} runs as user {user}, which cannot open the sockets of nodes of user "
            f"{added.user}: set its securityContext.runAsUser to {added.user}, or podSecurityContext.runAsUser of "
            f"lmkv's chart to {user}"
        )
    patch = _Patch(pod)
    place: tuple[str | int, ...] = ("spec", "containers", number)
    patch.extend((*place, "args"), _arguments(container, added.args))
    patch.extend((*place, "env"), _missing(added.env, container.get("env"), "name"))
    patch.extend((*place, "volumeMounts"), _mounts(container, added.volume_mounts))
    patch.extend(("spec", "volumes"), _missing(added.volumes, pod["spec"].get("volumes"), "name"))
    nodes = _missing(added.init_containers, pod["spec"].get("initContainers"), "name")
    patch.extend(("spec", "initContainers"), [_as_user(node, user) for node in nodes])
    patch.annotate(DONE_ANNOTATION, role)
    return patch.operations


def refuse(pod: Object, reason: str) -> list[Operation]:
    """Returns the patch that marks a pod that stays as it is."""
    patch = _Patch(pod)
    patch.annotate(REFUSED_ANNOTATION, reason)
    return patch.operations


class _Patch:
    """Operations on a pod. Each is only recorded if it changes something."""

    def __init__(self, pod: Object) -> None:
        self._pod = pod
        self.operations: list[Operation] = []

    def extend(self, path: tuple[str | int, ...], items: Iterable[Any]) -> None:
        """Appends to a list, which is created if it is missing."""
        added = list(items)
        holder: Any = self._pod
        for step in path[:-1]:
            holder = holder[step]
        if added and not holder.get(path[-1]):
            self.operations.append({"op": "add", "path": _pointer(path), "value": added})
        else:
            self.operations += [{"op": "add", "path": _pointer((*path, "-")), "value": item} for item in added]

    def annotate(self, name: str, value: str) -> None:
        """Sets an annotation."""
        present = self._pod.get("metadata", {}).get("annotations")
        if not present:
            self.operations.append({"op": "add", "path": "/metadata/annotations", "value": {name: value}})
        elif present.get(name) != value:
            self.operations.append({"op": "add", "path": _pointer(("metadata", "annotations", name)), "value": value})


def _pointer(path: Iterable[str | int]) -> str:
    """A JSON pointer. No step has a `~`."""
    return "".join("/" + str(step).replace("/", "~1") for step in path)


def _engine(pod: Object) -> int:
    """Index of the container with vLLM: the named container, the only container, or the only one that mentions vLLM."""
    containers: Sequence[Object] = pod["spec"]["containers"]
    names = [container["name"] for container in containers]
    named = (pod["metadata"].get("annotations") or {}).get(CONTAINER_ANNOTATION)
    if named is not None:
        if named not in names:
            raise Refusal(
                f"the annotation {CONTAINER_ANNOTATION} names no container: set it to one of: {', '.join(names)}"
            )
        return names.index(named)
    if len(containers) == 1:
        return 0
    found = [
        number
        for number, container in enumerate(containers)
        if any("vllm" in word for word in [container.get("image", ""), *_words(container)])
    ]
    if len(found) == 1:
        return found[0]
    raise Refusal(
        f"it is not clear which container runs vLLM: set the annotation {CONTAINER_ANNOTATION} to one of: "
        f"{', '.join(names)}"
    )


def _words(container: Object) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _arguments(container: Object, args: Sequence[str]) -> Sequence[str]:
    """The arguments that are missing. Raises `Refusal` if they would have no effect, or another connector is set."""
    words, option = _words(container), f"{TRANSFER_FLAG} '{args[-1]}'"
    config = _transfer_config(words)
    if config is not None:
        if CONNECTOR in config:
            return ()
        raise Refusal(
            f"container {container['name']} sets {TRANSFER_FLAG} without {CONNECTOR}: remove it, or add {CONNECTOR} to "
            "the connectors of a MultiConnector"
        )
    if _runs_shell(words):
        raise Refusal(
            f"container {container['name']} runs a shell, whose script gets no arguments: add to vLLM's in the script: "
            f"{option}"
        )
    if not words:
        raise Refusal(
            f"container {container['name']} has neither command nor args, so that arguments would replace the image's: "
            "set args to those of vllm serve"
        )
    return args


def _runs_shell(words: Sequence[str]) -> bool:
    """Whether the container runs a shell, whose script may contain the command line of vLLM."""
    return bool(words) and PurePosixPath(words[0]).name in SHELLS


def _transfer_config(words: Sequence[str]) -> str | None:
    """The text from the flag on, in words or in a script; None without the flag. vLLM accepts underscores, too."""
    text = " ".join(words)
    found = re.search(r"(?<!\S)--kv[-_]transfer[-_]config\b", text)
    return None if found is None else text[found.start() :]


def _missing(items: Iterable[Object], present: Sequence[Object] | None, name: str) -> list[Object]:
    names = {each[name] for each in present or ()}
    return [item for item in items if item[name] not in names]


def _mounts(container: Object, mounts: Sequence[Object]) -> list[Object]:
    present = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts") or ()}
    for mount in mounts:
        path = mount["mountPath"]
        if present.get(path, mount["name"]) != mount["name"]:
            raise Refusal(
                f"container {container['name']} mounts the volume {present[path]} at {path}, where lmkv's belongs: "
                "mount it elsewhere"
            )
    return _missing(mounts, container.get("volumeMounts"), "mountPath")


def _user(pod: Object, container: Object) -> int | None:
    """The user that the pod sets for a container; None: the image decides."""
    for holder in (container, pod["spec"]):
        user = (holder.get("securityContext") or {}).get("runAsUser")
        if user is not None:
            return int(user)
    return None


def _as_user(node: Object, user: int | None) -> Object:
    """A sidecar with the user of its engine, which opens its sockets. Root opens those of any user."""
    if not user:
        return node
    changed = deepcopy(dict(node))
    changed["securityContext"] = {**(changed.get("securityContext") or {}), "runAsUser": user}
    return changed
