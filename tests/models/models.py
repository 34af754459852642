"""The models, and how deep every test run explores them: within a second or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from tests.models.explorer import Model
from tests.models.handoffs import BufferHandoffModel, HandoffModel
from tests.models.moves import MoveModel
from tests.models.pool import PoolModel
from tests.models.registry import RegistryModel
from tests.models.shared_map import shared_map
from tests.models.tails import MapTailModel, NodeTailModel


class Explored(NamedTuple):
    """A model, and the number of actions that every test run takes."""

    models: Callable[[], AbstractContextManager[Callable[[], Model]]]
    """Makes models within a context."""
    depth: int


def pure(model: Callable[[], Model]) -> Callable[[], AbstractContextManager[Callable[[], Model]]]:
    """Of a model that needs no context."""
    return lambda: nullcontext(model)


MODELS: Mapping[str, Explored] = {
    "pool": Explored(pure(PoolModel), 4),
    "handoff": Explored(pure(HandoffModel), 5),
    "handoff to a device buffer": Explored(pure(BufferHandoffModel), 5),
    "registration": Explored(pure(RegistryModel), 5),
    "shared map": Explored(shared_map, 5),
    "moves of two coordinators": Explored(pure(MoveModel), 9),
    "tails of a node": Explored(pure(NodeTailModel), 4),
    "tails of a map": Explored(pure(MapTailModel), 5),
}
