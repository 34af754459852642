"""Acts and events of an `Attach` stream, as tests write and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from lmkv.v1 import engine_service_pb2 as pb


def _reserve(counts: int | Sequence[int]) -> pb.ReserveCredits:
    return pb.ReserveCredits(counts=[counts] if isinstance(counts, int) else counts)


_WRAPPED: dict[str, Callable[[Any], Any]] = {
    "serve_models": lambda names: pb.ServeModels(served_models=names),
    "commit": lambda chunks: pb.CommitChunks(chunks=chunks),
    "drop_damaged": lambda keys: pb.DropDamagedChunks(chunk_keys=b"".join(keys)),
    "return_credits": lambda offsets: pb.ReturnCredits(offsets=offsets),
    "reserve": lambda wanted: wanted if isinstance(wanted, pb.ReserveCredits) else _reserve(wanted),
    "end_handoff": lambda name: pb.EndHandoff(handoff_id=name),
    "reset": lambda _: pb.ResetChunks(),
    "change_weights": lambda version: pb.ChangeWeights(weight_version=version),
}
"""What the message of an act is made of in tests; of other acts, tests give the message itself."""


def acts(**named: Any) -> list[pb.Act]:
    """Acts by their names, in this order. A list of messages is as many acts of its kind."""
    made = []
    for name, value in named.items():
        wrap = _WRAPPED.get(name)
        for one in [wrap(value)] if wrap else value if isinstance(value, list) else [value]:
            fields: dict[str, Any] = {name: one}
            made.append(pb.Act(**fields))
    return made


def request(**named: Any) -> pb.AttachRequest:
    """A message with these `acts`."""
    return pb.AttachRequest(acts=acts(**named))


def events(message: pb.AttachResponse, kind: str) -> Iterator[Any]:
    return (getattr(event, kind) for event in message.events if event.WhichOneof("event") == kind)


class Heard:
    """What a node has said and a test has not read yet."""

    def __init__(self) -> None:
        self._events: dict[str, list[Any]] = {}

    def add(self, message: pb.AttachResponse) -> None:
        """Adds the events of a message."""
        for event in message.events:
            kind = event.WhichOneof("event")
            assert kind is not None
            self._events.setdefault(kind, []).append(getattr(event, kind))
            if kind == "granted":
                granted = event.granted
                self._events.setdefault("credits", []).extend(granted.credits)
                self._events.setdefault("settled_partial", []).extend(granted.settled_partial_token_counts)
                pairs = zip_longest(self._events.get("settled", ()), granted.settled_counts, fillvalue=0)
                self._events["settled"] = [sum(pair) for pair in pairs]

    def take(self, kind: str) -> list[Any]:
        """Removes the events of a kind; of a reset its count, of conflicts the last ones.

        Besides kinds of events: the `credits` that were granted, and how many are `settled`, by part, or
        `settled_partial`, by tokens.
        """
        found = self._events.pop(kind, [])
        if kind == "reset":
            return [one.chunk_count for one in found]
        return list(found[-1].conflicts) if found and kind == "conflicts" else found

    def __getitem__(self, kind: str) -> list[Any]:
        """The same, and it stays."""
        return self._events.get(kind, [])

    def __contains__(self, kind: str) -> bool:
        return bool(self._events.get(kind))
