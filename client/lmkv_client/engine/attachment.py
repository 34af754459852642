"""One attachment of an engine to its node, and how its acts are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lmkv.v1 import engine_service_pb2 as pb


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """The pool that extents refer to. With a new attachment all extents of the old one are invalid."""

    engine_id: str
    pool_socket: str
    epoch: int
    node_address: str = ""
    """gRPC address of the node."""
    device_buffer_bytes: int = 0
    """Bytes of the device buffer that the node would use; 0: none."""
    weight_version: str = ""
    """Version of the weights with which the engine attached."""


class Send(Protocol):
    """Sends acts to the node, in order; never blocks."""

    def __call__(self, *acts: pb.Act) -> None: ...
