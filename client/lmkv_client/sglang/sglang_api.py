"""Everything that is imported from SGLang, and the parts of its objects that a storage backend uses.

Without SGLang the base class is empty, so that all else of the backend can be tested.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from lmkv_client.file_digests import process_start

if TYPE_CHECKING:
    import torch

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
except ModuleNotFoundError:

    class HiCacheStorage:  # type: ignore[no-redef]
        """Base class of storage backends."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            """Remembers the host pool."""
            self.mem_pool_host = mem_pool_host

    @dataclass
    class PoolTransferResult:  # type: ignore[no-redef]
        """Number of pages that are held: of the KV pool, and of each other pool."""

        kv_hit_pages: int
        extra_pool_hit_pages: dict[str, int]


__all__ = [
    "HiCacheStorage",
    "HostPool",
    "ModelSource",
    "PoolTransferResult",
    "StorageConfig",
    "WeightWatcher",
    "is_writer",
    "served_model",
    "shards",
    "used_config",
    "watch_weight_updates",
]

WEIGHT_UPDATES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
"""Methods of SGLang's `WeightUpdater` that change weights in place, or announce it."""
WATCHED = "lmkv_watched"
"""Attribute of a method that is watched already."""


class StorageConfig(Protocol):
    """The fields of `HiCacheStorageConfig` that are used."""

    tp_rank: int
    tp_size: int
    is_mla_model: bool
    """Whether all tensor-parallel ranks have the same pages."""
    model_name: str | None
    extra_config: dict[str, Any] | None


class HostPool(Protocol):
    """The fields of `HostKVCache` that are used: the host memory that pages are copied to before they are stored."""

    layout: str
    page_size: int
    """Tokens of a page."""
    dtype: torch.dtype
    """The elements are stored with this type: `uint8` for 8-bit floats."""

    @property
    def kv_buffer(self) -> torch.Tensor | None:
        """Keys and values, `[2, ...]`, or with MLA one latent; the other dimensions follow from the layout.

        None where further pools have all tensors, and this one only numbers their pages.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Describes the origin of the model's weights, and the options by which SGLang uses them."""

    path: str
    revision: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    """As the flag names it."""
    draft_path: str = ""
    """The path of a draft model, whose layers may be in the same pages; empty if there is none."""
    draft_revision: str = ""
    dtype: str = ""
    load_format: str = "auto"
    loaded_after: float | None = None
    """The time at which this process was started, before it loaded the weights; None outside of SGLang."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of `config.json`, if the model is a local folder."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """All arguments of the server that differ from SGLang's defaults, by name."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Name and path of each LoRA adapter that the server begins with."""


def served_model(default_path: str) -> ModelSource:
    """The model of this process; outside of SGLang, the one in the folder `default_path`."""
    arguments = _server_arguments()
    if arguments is None:
        return ModelSource(path=default_path, config=_read_config(default_path))
    return ModelSource(
        path=str(arguments.model_path),
        revision=str(arguments.revision or ""),
        quantization=str(arguments.quantization or ""),
        kv_cache_dtype=str(arguments.kv_cache_dtype or ""),
        draft_path=str(arguments.speculative_draft_model_path or ""),
        draft_revision=str(getattr(arguments, "speculative_draft_model_revision", None) or ""),
        dtype=str(getattr(arguments, "dtype", None) or ""),
        load_format=str(getattr(arguments, "load_format", None) or "auto"),
        loaded_after=process_start(),
        config=_read_config(str(arguments.model_path)),
        options=_changed_options(arguments),
        adapters=_first_adapters(arguments),
    )


def _changed_options(arguments: Any) -> dict[str, Any]:
    from msgspec import NODEFAULT  # of SGLang's dependencies
    from msgspec.structs import fields

    changed = {}
    for each in fields(arguments):
        default = each.default if each.default_factory is NODEFAULT else each.default_factory()
        if (value := getattr(arguments, each.name)) != default:
            changed[each.name] = value
    return changed


def _first_adapters(arguments: Any) -> tuple[tuple[str, str], ...]:
    """SGLang derives the names of their pages from name and path alone. Those of adapters that are loaded later are
    random: no other engine, and no other adapter, has the same."""
    from sglang.srt.arg_groups.overrides import resolving_view

    used = resolving_view(arguments)
    return tuple((str(one.lora_name), str(one.lora_path)) for one in used.lora_paths or ()) if used.enable_lora else ()


def used_config(model: ModelSource) -> Mapping[str, Any]:
    """All of the model's configuration as SGLang computes with it, and its `_commit_hash` if it is of Hugging Face;
    outside of SGLang, the content of `config.json`."""
    arguments = _server_arguments()
    if arguments is None:
        return model.config
    from sglang.srt.configs.model_config import ModelConfig

    used = ModelConfig.from_server_args(arguments).hf_config
    return {**used.to_dict(), "_commit_hash": getattr(used, "_commit_hash", None)}


def _server_arguments() -> Any | None:
    """The arguments of the server that this process belongs to; None outside of SGLang."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, RuntimeError, ValueError):  # no SGLang, or no server in this process
        return None


def _read_config(model_path: str) -> dict[str, Any]:
    file = Path(model_path) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return config


def is_writer(config: StorageConfig) -> bool:
    """Whether this rank stores its pages: each does, unless all ranks have the same pages."""
    named: bool | None = getattr(config, "is_storage_writer", None)
    if named is not None:
        return named
    return not config.is_mla_model or config.tp_rank == 0


def shards(config: StorageConfig) -> Mapping[str, tuple[int, int]]:
    """Rank and size of each kind of parallelism by which ranks have different pages, where the size is not 1."""
    prefixes = {"pp": "pp", "cp": "attn_cp", "dcp": "dcp"} | ({} if config.is_mla_model else {"tp": "tp"})
    found = {}
    for kind, prefix in prefixes.items():
        size = int(getattr(config, f"{prefix}_size", 1) or 1)
        if size > 1:
            found[kind] = (int(getattr(config, f"{prefix}_rank")), size)
    return found


class WeightWatcher(Protocol):
    """Is informed when weights change in place."""

    def weights_change(self) -> None:
        """Called before they change, on the thread that schedules."""


_watchers: WeakSet[WeightWatcher] = WeakSet()


def watch_weight_updates(watcher: WeightWatcher) -> None:
    """Has `watcher` informed of each change of weights in this process, as long as it lives. Outside of SGLang: never.

    SGLang does not notify storage backends of them: its own keep and find the pages of the old weights.
    """
    try:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    except ImportError:
        return
    for name in WEIGHT_UPDATES:
        method = getattr(WeightUpdater, name)
        if not hasattr(method, WATCHED):
            setattr(WeightUpdater, name, _announced(method))
    _watchers.add(watcher)


def _announced(method: Any) -> Any:
    @functools.wraps(method)
    def announced(self: Any, *args: Any, **options: Any) -> Any:
        for watcher in list(_watchers):
            watcher.weights_change()
        return method(self, *args, **options)

    setattr(announced, WATCHED, True)
    return announced
