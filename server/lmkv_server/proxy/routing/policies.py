"""What an engine costs a request, by policy: the engine of least cost takes it. No IO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkv_server.proxy.routing.engines import Engine

Cost = Callable[["Engine", Mapping[str, int]], int]
"""Cost of an engine, with the tokens of the prompt that each instance holds. Engines of equal cost take turns."""


def cost_by(policy: str, load_tokens: int) -> Cost:
    """The cost that a policy means; for `kv_aware` each request in flight outweighs `load_tokens` held tokens."""

    def round_robin(_: Engine, __: Mapping[str, int]) -> int:
        return 0

    def least_loaded(engine: Engine, _: Mapping[str, int]) -> int:
        return engine.in_flight_count

    def kv_aware(engine: Engine, held: Mapping[str, int]) -> int:
        return engine.in_flight_count * load_tokens - held.get(engine.instance_id, 0)

    return {"round_robin": round_robin, "least_loaded": least_loaded, "kv_aware": kv_aware}[policy]
