"""The order in which a node carries out the acts of one `AttachRequest`. Used by the engine's client and the node."""

from __future__ import annotations

from lmkv.v1.engine_service_pb2 import AttachRequest

ATTACH_ORDER: tuple[str, ...] = tuple(
    field.name
    for field in sorted(AttachRequest.DESCRIPTOR.fields, key=lambda field: field.number)
    if field.name != "hello"
)
"""Fields of `AttachRequest` that are acts, by number: the order that `engine_service.proto` promises."""


def can_merge(first: AttachRequest, second: AttachRequest) -> bool:
    """Whether one message with the acts of both has the same effect as `first` followed by `second`."""
    last = max((at for at, name in enumerate(ATTACH_ORDER) if getattr(first, name)), default=0)
    start = min((at for at, name in enumerate(ATTACH_ORDER) if getattr(second, name)), default=last)
    return start >= last
