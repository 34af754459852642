"""What is added to a pod, by the role of its engine. The chart renders it by the templates of its own engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lmkv.errors import ConfigError

Object = Mapping[str, Any]
"""An object of the Kubernetes API, or a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Additions:
    """What an engine's pod needs to use lmkv."""

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
