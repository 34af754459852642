"""Informs connectors when vLLM changes weights, names their version, loads adapters, or empties its prefix cache.

vLLM has no hook for that. All such calls arrive at `EngineCore`, between steps and on the thread that schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lmkv_client.connector.vllm_api import LoRARequest, engine_core

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
    """Watches the engines of this process; `sides` finds the scheduler sides of an engine. Idempotent."""
    core = engine_core()

    def before(name: str, inform: Callable[..., bool]) -> None:
        def call(method: Callable[[], Any], self: Any, args: Any, options: Any) -> Any:
            if inform(found := sides(self), *args, **options):
                for one in (*found, *encoder_caches(self)):
                    one.weights_changed()
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
    _wrap(core, "add_lora", _load_adapter(sides))
    after("remove_lora", _adapter_removed)
    after("set_weight_version", _named)
    after("reset_prefix_cache", _reset)
    after("reset_encoder_cache", _encoder_reset)


def encoder_caches(core: Any) -> list[Any]:
    """lmkv's connector of the encoder cache in an `EngineCore`, if there is one."""
    connector = getattr(getattr(core, "scheduler", None), "ec_connector", None)
    return [connector] if hasattr(connector, "weights_changed") else []


def _wrap(core: Any, name: str, call: Callable[[Callable[[], Any], Any, Any, Any], Any]) -> None:
    method = getattr(core, name, None)
    if method is None or hasattr(method, WATCHED):  # vLLM 0.31 has no versions of weights
        return

    @functools.wraps(method)
    def watched(self: Any, *args: Any, **options: Any) -> Any:
        return call(functools.partial(method, self, *args, **options), self, args, options)

    setattr(watched, WATCHED, True)
    setattr(core, name, watched)


def _called(
    sides: list[SchedulerSide],
    method: str | Callable[..., Any],
    _timeout: Any = None,
    args: Any = (),
    *_: Any,
    **__: Any,
) -> bool:
    """Whether weights may change."""
    for lora in args or ():
        if isinstance(lora, LoRARequest):
            _adapter_loads(sides, lora)
    if method == "remove_lora":
        _adapter_removed(sides, True, *args)
    return method not in HARMLESS_CALLS


def _load_adapter(find_sides: Callable[[Any], list[SchedulerSide]]) -> Callable[..., Any]:
    def call(method: Callable[[], Any], self: Any, args: Any, options: Any) -> Any:
        lora: LoRARequest = args[0] if args else options["lora_request"]
        _adapter_loads(sides := find_sides(self), lora)
        try:
            return method()
        except BaseException:
            for side in sides:
                side.adapters.failed(lora.lora_int_id)
            raise

    return call


def _adapter_loads(sides: list[SchedulerSide], lora_request: LoRARequest) -> None:
    for side in sides:
        side.adapters.loading(lora_request)


def _adapter_removed(sides: list[SchedulerSide], _result: Any, lora_id: int) -> None:
    for side in sides:
        side.adapters.removed(lora_id)


def _sleeps(_sides: list[SchedulerSide], level: int = 1, *_: Any, **__: Any) -> bool:
    """Whether weights change."""
    return level >= DISCARDING_SLEEP


def _named(sides: list[SchedulerSide], _result: None, weight_version: str) -> None:
    for side in sides:
        side.name_weights(weight_version)


def _reset(sides: list[SchedulerSide], is_empty: bool, *_: Any, **__: Any) -> None:
    for side in sides if is_empty else ():
        side.pages_cleared()


def _encoder_reset(sides: list[SchedulerSide], _result: None) -> None:
    for side in sides:
        side.encoder_cleared()
