"""Informs connectors when vLLM changes weights, names their version, or empties its prefix cache.

vLLM has no hook for that. All such calls arrive at `EngineCore`, between steps and on the thread that schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lmkv_client.connector.vllm_api import engine_core

if TYPE_CHECKING:
    from lmkv_client.connector.scheduler.side import SchedulerSide

WATCHED = "lmkv_watched"
"""Attribute of a method that is watched already."""

HARMLESS_CALLS = frozenset(
    {
        "add_lora",
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Methods of vLLM's workers that leave the weights as they are. Others, and those of worker extensions, may not."""
DISCARDING_SLEEP = 2
"""The level of sleep from which on weights are discarded."""


def watch(sides: Callable[[Any], list[SchedulerSide]]) -> None:
    """Watches the engines of this process; `sides` finds the scheduler sides of one. Idempotent."""
    core = engine_core()

    def before(name: str, inform: Callable[..., None]) -> None:
        def call(method: Callable[[], Any], self: Any, args: Any, options: Any) -> Any:
            inform(sides(self), *args, **options)
            return method()

        _wrap(core, name, call)

    def after(name: str, inform: Callable[..., None]) -> None:
        def call(method: Callable[[], Any], self: Any, args: Any, options: Any) -> Any:
            result = method()
            inform(sides(self), result, *args, **options)
            return result

        _wrap(core, name, call)

    before("collective_rpc", _called)
    before("sleep", _sleeps)
    after("set_weight_version", _named)
    after("reset_prefix_cache", _reset)


def _wrap(core: Any, name: str, call: Callable[[Callable[[], Any], Any, Any, Any], Any]) -> None:
    method = getattr(core, name, None)
    if method is None or hasattr(method, WATCHED):  # vLLM 0.31 has no versions of weights
        return

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **options: Any) -> Any:
        return call(functools.partial(method, self, *args, **options), self, args, options)

    setattr(watched, WATCHED, True)
    setattr(core, name, watched)


def _called(sides: list[SchedulerSide], method: str | Callable[..., Any], *_: Any, **__: Any) -> None:
    if method not in HARMLESS_CALLS:
        for side in sides:
            side.weights_changed()


def _sleeps(sides: list[SchedulerSide], level: int = 1, *_: Any, **__: Any) -> None:
    for side in sides if level >= DISCARDING_SLEEP else ():
        side.weights_changed()


def _named(sides: list[SchedulerSide], _result: None, weight_version: str) -> None:
    for side in sides:
        side.name_weights(weight_version)


def _reset(sides: list[SchedulerSide], is_empty: bool, *_: Any, **__: Any) -> None:
    for side in sides if is_empty else ():
        side.pages_cleared()
