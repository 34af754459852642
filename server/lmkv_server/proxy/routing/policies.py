"""Routing policies: the cost of an engine for a request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lmkv_server.proxy.engine import Engine

Cost = Callable[[Engine, Mapping[str, int]], int]
"""Cost of an engine, given the number of prompt tokens that each instance holds. The engine of least cost serves."""


def cost_by(policy: str, load_tokens: int) -> Cost:
    """The cost function of a policy. `kv_aware` weighs a request in flight like `load_tokens` held tokens."""

    def round_robin(_: Engine, __: Mapping[str, int]) -> int:
        return 0

    def least_loaded(engine: Engine, _: Mapping[str, int]) -> int:
        return engine.in_flight_count

    def kv_aware(engine: Engine, cached: Mapping[str, int]) -> int:
        return engine.in_flight_count * load_tokens - cached.get(engine.instance_id, 0)

    return {"round_robin": round_robin, "least_loaded": least_loaded, "kv_aware": kv_aware}[policy]
