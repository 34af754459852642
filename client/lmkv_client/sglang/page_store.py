"""`PageStore`: the pages of one rank of SGLang in a node, by SGLang's names, for the storage backend and the linker.

Calls on the node never fail: they find, read or store less. What a caller does besides goes through `attempt`, which
counts an error and returns a miss: SGLang never restarts a thread that an error has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.spec import KvSpec
from lmkv_client.engine import Copier, Engine, Held, Written
from lmkv_client.engine.late_engine import LateEngine
from lmkv_client.sglang.host_pool import LayerTensors, make_pages, page_numbers
from lmkv_client.sglang.kv_spec import (
    adapters_identity,
    check_shares,
    identity_across_engines,
    identity_of,
    kv_dtype,
    make_spec,
)
from lmkv_client.sglang.sglang_api import served_model, used_config, watch_weight_updates

logger = logging.getLogger("sglang.lmkv")

WARNING_SECONDS = 10.0
"""Least time between two warnings about failed calls."""

Result = TypeVar("Result")


@dataclass(slots=True)
class PageCounts:
    """Pages that SGLang asked for or gave since the start, and calls that failed."""

    looked_up: int = 0
    found: int = 0
    read: int = 0
    failed_reads: int = 0
    written: int = 0
    held_before: int = 0
    """Pages that were not written because the node had them."""
    failed_writes: int = 0
    failed_calls: int = 0


class PageStore:
    """The pages of one rank. Any thread may call it, and several at once.

    Before it is attached and after `close` all calls raise `RuntimeError`, which `attempt` counts.
    """

    def __init__(self, settings: ConnectorConfig) -> None:
        """`attach` makes it usable."""
        for notice in settings.notices:
            logger.warning("%s", notice)
        self.settings = settings
        self.counts = PageCounts()
        self._engine: LateEngine | None = None
        self._copier: Copier | None = None
        self._tensors: LayerTensors = ()
        """Keep the memory of the pages alive."""
        self._page_size = 0
        self._other_pools: set[str] = set()
        self._weights_changed = False
        self._lock = threading.Lock()
        """The lock guards the counts."""
        self._warned_at = -WARNING_SECONDS

    def attach(
        self,
        tensors: LayerTensors,
        *,
        model_name: str,
        stored_dtype: str,
        page_size: int,
        shards: Mapping[str, tuple[int, int]],
    ) -> None:
        """Attaches to a node, and describes the pages to the copy kernels.

        `tensors` are the layers of keys and of values, or of latents, each `[pages, heads, tokens of a page,
        elements]`; `stored_dtype` is torch's name of their elements, `shards` as of `sglang_api.shards`. Raises
        `ConfigError` if the node cannot start as configured, or the pages are of a kind that lmkv does not know.
        """
        model = served_model(model_name)
        dtype = kv_dtype(stored_dtype, model.kv_cache_dtype)
        check_shares(model)
        config = used_config(model) if self.settings.share_across_engines else {}
        watch_weight_updates(self)

        def attach() -> Engine:
            model_id = self.settings.model_id
            if self.settings.share_across_engines:
                model_id = identity_across_engines(model, config, model_id=model_id, kv_dtype=dtype, shards=shards)
            spec = make_spec(
                tensors,
                shards,
                page_size=page_size,
                model_id=(model_id or identity_of(model)) + adapters_identity(model),
                model_name=model_name,
                kv_dtype=dtype,
                weight_version=self.settings.weight_version,
            )
            return self._attach(replace(spec, accepts_lossy=self.settings.accept_lossy), tensors)

        self._engine = LateEngine(attach, without="nothing is loaded or stored")
        self._engine.wait(None if model.loaded_after is None else time.time() - model.loaded_after)

    def _attach(self, spec: KvSpec, tensors: LayerTensors) -> Engine:
        engine = Engine.attach(spec, config=self.settings)
        try:
            self._copier = engine.register(make_pages(tensors))
        except ValueError as error:
            engine.close()
            raise ConfigError(f"this version of lmkv cannot copy the pages of SGLang: {error}") from None
        self._tensors, self._page_size = tensors, spec.chunk_size
        logger.info("pages of %d tokens, %d bytes each; model %s", spec.chunk_size, spec.chunk_bytes, spec.model_id)
        return engine

    @property
    def is_of_use(self) -> bool:
        """Whether there are pages that can be loaded and stored."""
        is_late = self._engine is not None and self._engine.engine is None
        return not is_late and not self._other_pools and not self._weights_changed

    def add_other_pool(self, name: str) -> None:
        """Notes a pool whose pages lmkv does not store: nothing of the model is loaded or stored from now on."""
        if name not in self._other_pools:
            self._other_pools.add(name)
            logger.warning("this version of lmkv stores nothing of models with %s", name)

    def weights_change(self) -> None:
        """Loads and stores nothing from now on: the keys name the weights that the engine has started with."""
        if not self._weights_changed:
            self._weights_changed = True
            logger.warning("weights change in place: nothing is loaded or stored until the engine restarts")

    def lookup(self, names: Sequence[str], *, engine_request_id: str = "", is_continued: bool = False) -> Held:
        """Looks up how many of the first pages the node holds, by SGLang's page hashes.

        Blocks for at most `lookup_timeout`. SGLang schedules nothing meanwhile, so no prefill rate is reported, which
        would allow a longer wait.

        `is_continued`: the pages were looked up before.
        """
        engine = self._attached()
        return engine.lookup(engine.foreign_keys(names), engine_request_id=engine_request_id, is_continued=is_continued)

    def page_numbers(self, slots: Sequence[int], page_count: int) -> list[int]:
        """The pages that these slots are. Raises `ValueError` unless they are `page_count` whole pages of the pool."""
        pages = page_numbers(slots, self._page_size, page_count)
        if pages and not 0 <= min(pages) <= max(pages) < self._tensors[0][0].shape[0]:
            raise ValueError("a page is beyond the end of the pool")
        return pages

    def read(self, held: Held, pages: Sequence[int]) -> int:
        """Copies the first chunks that were found into these pages. Returns their number; fewer if a load fails."""
        extents = list(held.load(min(len(pages), held.hit_count), timeout=self.settings.load_timeout))
        assert self._copier is not None
        self._copier.scatter(extents, [[page] for page in pages[: len(extents)]])
        return len(extents)

    def write(
        self, names: Sequence[str], pages: Sequence[int], before: Sequence[str] = (), *, timeout: float | None = None
    ) -> int:
        """Stores pages that the node lacks. Returns how many of the first pages it holds then.

        `before` is the name of the page that precedes them, if it is known. Waits for extents for at most `timeout`
        seconds; None: `load_timeout`.
        """
        engine = self._attached()
        keys = engine.foreign_keys(names)
        parents: list[bytes] = [*engine.foreign_keys(before), *keys] if before else [b"", *keys]
        at = held_before = len(keys) - len(engine.missing(keys, timeout=self.settings.lookup_timeout))
        deadline = time.monotonic() + (self.settings.load_timeout if timeout is None else timeout)
        while at < len(keys):
            extents = engine.reserve(len(keys) - at, timeout=max(0.0, deadline - time.monotonic()))
            if not extents:
                break
            end = at + len(extents)
            try:
                assert self._copier is not None
                sums = self._copier.gather(extents, [[page] for page in pages[at:end]])
                engine.commit(Written.chain(keys[at:end], extents, parent=parents[at], checksums=sums))
            except BaseException:
                engine.put_back(extents)
                raise
            at = end
        self.count(written=at - held_before, held_before=held_before)
        return at

    def attempt(self, call: Callable[..., Result], *arguments: object, default: Result) -> Result:
        """Returns the result of the call, or `default` if it fails, which is counted."""
        try:
            return call(*arguments)
        except Exception as error:
            self.count(failed_calls=1)
            if time.monotonic() - self._warned_at > WARNING_SECONDS:
                self._warned_at = time.monotonic()
                logger.warning("a call failed, and its pages count as misses: %s", error, exc_info=True)
            return default

    def count(self, **more: int) -> None:
        """Adds to the counts of these names."""
        with self._lock:
            for name, count in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)

    def close(self) -> None:
        """Detaches from the node, and logs the counts. Idempotent."""
        if self._engine is None:
            return
        engine = self._engine.engine
        self._engine.close()
        if engine is not None:
            missed = engine.counters.miss_tokens
            logger.info("pages: %s", ", ".join(f"{name} {count}" for name, count in asdict(self.counts).items()))
            logger.info("missed tokens: %s", ", ".join(f"{count} {name}" for name, count in missed.items()) or "none")

    def _attached(self) -> Engine:
        if self._engine is None or (engine := self._engine.engine) is None:
            raise RuntimeError("not attached")
        return engine
