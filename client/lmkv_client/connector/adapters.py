"""LoRA adapters as vLLM has loaded them: what identifies each, and whether that is still what vLLM has in memory.

vLLM loads an adapter at its first request, keeps it under its number, and may drop and read it again later. The files
are stamped before it can have read them for the first time. While they keep their stamps, it has read nothing else;
once they have changed, what it has in memory is not known, and nothing is looked up or stored for the adapter until
vLLM loads it in place, under another number, or after a removal.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path

from lmkv.errors import ConfigError, LmkvError
from lmkv_client.connector.vllm_api import LoRARequest, adapter_pages, init_logger
from lmkv_client.file_digests import REMEMBERED_BYTES, Stamp, stamps
from lmkv_client.model_identity import (
    ADAPTER_CONFIG,
    MAX_ADAPTERS,
    adapter_digest,
    cached_snapshot,
    weight_files,
)

logger = init_logger("vllm.lmkv")


class Adapter:
    """One adapter, with its files as they were before vLLM loaded it."""

    def __init__(self, lora: LoRARequest, folder: Path, options: str) -> None:
        """Begins to compute the digest. `options` are the engine's (`adapter_options`).

        Raises `OSError` if there are no files.
        """
        self.number = lora.lora_int_id
        self.path = lora.lora_path
        self.name = lora.lora_name
        self.pages = adapter_pages(lora)
        """vLLM hashes these values into the keys of its own pages, so that adapters do not share pages."""
        self.identity = ""
        """`name@digest`; empty while that is not known, or if it never will be."""
        self.is_ambiguous = False
        """Whether vLLM may have loaded other files under the same number."""
        self._config, self._weights = folder / ADAPTER_CONFIG, weight_files(folder)
        self._stamped = stamps([self._config, *self._weights, *_branch(folder)])
        self._fields = (options, str(lora.is_3d_lora_weight))
        if sum(stamp.size_bytes for stamp in self._stamped.values()) <= REMEMBERED_BYTES:
            self._identify()
        else:
            threading.Thread(target=self._identify, name="lmkv-adapter", daemon=True).start()

    @property
    def stamped(self) -> Mapping[Path, Stamp]:
        """The stamps of its files."""
        return self._stamped

    @property
    def is_unchanged(self) -> bool:
        """Whether its files are still as they were."""
        try:
            return stamps(self._stamped) == self._stamped
        except OSError:
            return False

    def _identify(self) -> None:
        try:
            weights = {path: self._stamped[path] for path in self._weights}
            self.identity = f"{self.name}@{adapter_digest(self._config, weights, *self._fields)}"
        except (OSError, ValueError, AttributeError, LmkvError) as error:
            logger.warning("adapter %s: nothing is looked up or stored for it: %s", self.name, error)


class Adapters:
    """The adapters of one engine, by vLLM's numbers."""

    def __init__(self, options: str = "", kept_count: int = 0) -> None:
        """`options` decide how the engine applies adapters. `kept_count`: how many vLLM keeps there at most."""
        self._options = options
        self._limit = max(MAX_ADAPTERS, kept_count)
        self._loaded: OrderedDict[int, Adapter] = OrderedDict()
        self._absent: set[int] = set()
        """Numbers of adapters of a hub that were not in its cache when vLLM began to load them."""
        self._computed: OrderedDict[Hashable, Adapter] = OrderedDict()
        """The adapter whose pages vLLM may have, for each name that vLLM uses for pages."""
        self._stale: set[Hashable] = set()
        """Names under which vLLM's prefix cache may have pages of several adapters."""

    def loading(self, lora: LoRARequest) -> None:
        """vLLM is about to load this adapter, unless it has it already and is not to load it in place."""
        if lora.load_inplace or lora.lora_int_id not in self._loaded:
            self._stamp(lora)

    def failed(self, number: int) -> None:
        """vLLM could not load this adapter: it may still have an earlier adapter in memory."""
        if adapter := self._loaded.get(number):
            adapter.is_ambiguous = True

    def removed(self, number: int) -> None:
        """vLLM has removed an adapter."""
        self._loaded.pop(number, None)
        self._absent.discard(number)

    def of_request(self, lora: LoRARequest) -> Adapter | None:
        """The adapter of a request that begins now; None if what vLLM has, or will have, in memory is not known."""
        if getattr(lora, "tensorizer_config_dict", None):  # vLLM 0.31: the weights are elsewhere
            return None
        adapter = self._loaded.get(lora.lora_int_id)
        if adapter is None or (lora.load_inplace and not self.is_current(adapter)):  # vLLM reads it again in each step
            adapter = self._stamp(lora)
        elif adapter.path != lora.lora_path:
            adapter.is_ambiguous = True
        if adapter is None:
            return None
        self._loaded.move_to_end(lora.lora_int_id)
        return adapter if adapter.identity and self.is_current(adapter) else None

    def is_current(self, adapter: Adapter) -> bool:
        """Whether what vLLM has in memory under this number can only be this adapter."""
        if self._loaded.get(adapter.number) is not adapter or adapter.is_ambiguous:
            return False
        if not adapter.is_unchanged:
            adapter.is_ambiguous = True
            logger.warning(
                "the files of adapter %s have changed since it was loaded: nothing is looked up or stored for it until "
                "it is loaded again (load_inplace), or under another number",
                adapter.name,
            )
        return not adapter.is_ambiguous

    def has_stale_pages(self, adapter: Adapter) -> bool:
        """Whether vLLM may confuse pages of other files with pages of this adapter."""
        return adapter.pages in self._stale

    def pages_cleared(self) -> None:
        """vLLM's prefix cache is empty."""
        self._stale.clear()

    def _stamp(self, lora: LoRARequest) -> Adapter | None:
        number = lora.lora_int_id
        self._loaded.pop(number, None)
        folder = _folder(lora.lora_path)
        if folder is None or (number in self._absent and len(list(folder.parent.iterdir())) > 1):
            self._absent.add(number)
            return None
        self._absent.discard(number)
        try:
            adapter = Adapter(lora, folder, self._options)
        except OSError as error:  # vLLM will report it
            logger.debug("adapter %s: %s", lora.lora_name, error)
            return None
        self._loaded[number] = adapter
        before = self._computed.pop(adapter.pages, None)
        if before is not None and before.stamped != adapter.stamped:
            self._stale.add(adapter.pages)
        self._computed[adapter.pages] = adapter
        for kept in (self._loaded, self._computed):
            while len(kept) > self._limit:
                kept.popitem(last=False)
        return adapter


def _folder(path: str) -> Path | None:
    """The folder from which vLLM loads an adapter; None if it is not there yet, or cannot be known."""
    if Path(path).is_absolute():
        return Path(path)
    if path.startswith("~"):
        return Path(path).expanduser()
    if Path(path).exists():
        return Path(path).absolute()
    if os.environ.get("VLLM_USE_MODELSCOPE", "0").lower() in ("1", "true"):
        return None
    try:
        return cached_snapshot(path, "main", None)
    except ConfigError:
        return None


def _branch(folder: Path) -> list[Path]:
    """Returns the file that names the commit which vLLM loads, for an adapter of a hub."""
    branch = folder.parent.parent / "refs" / "main"
    return [branch] if folder.parent.name == "snapshots" and branch.is_file() else []
