"""Messages that only coordinators and nodes send each other (generated), and the version that both compare first."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv import __version__
from lmkv.errors import VersionMismatch
from lmkv.safe_text import safe_text

PROTOCOL_VERSION = 1
"""Raise it with every change of `lmkv.internal.v1` that the version before would misunderstand (`scripts/breaking`)."""
MAX_VERSION_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """The versions that a coordinator or a node runs."""

    version: str
    """Its version of lmkv."""
    protocol_version: int
    """Its `PROTOCOL_VERSION`; 0 if it is from before there was one."""

    def __str__(self) -> str:
        version = safe_text(self.version, MAX_VERSION_LENGTH) or "of an unknown version"
        return f"lmkv {version} (protocol {self.protocol_version})"


OWN_BUILD = Build(version=__version__, protocol_version=PROTOCOL_VERSION)


def check_builds(*, node: Build, coordinator: Build) -> None:
    """Raises `VersionMismatch`, a sentence for the logs of both sides, unless both speak the same protocol."""
    if node.protocol_version != coordinator.protocol_version:
        raise VersionMismatch(
            f"the node runs {node}, the coordinator runs {coordinator}; the node shares nothing until both run the "
            "same version: upgrade coordinators and nodes together",
            node=node,
            coordinator=coordinator,
        )
