"""One attachment of an engine to its node. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
