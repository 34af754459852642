"""What a node registers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmkv.spec import KvSpec, ServedModel

MAX_SHOWN = 500
"""Characters of a client's text that an error repeats: all of them must fit into the trailers of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceInfo:
    """What a node sends when it registers; the fields are those of `lmkv.v1.Instance`."""

    instance_id: str
    epoch: int
    peer_address: str
    specs: tuple[KvSpec, ...] = ()
    version: str = ""
    served_models: tuple[ServedModel, ...] = ()
    """Further names; the fingerprint of each is that of one of `specs`."""
    size_bytes: int = field(default=0, compare=False)
    """Size of its message."""
