"""Messages between the two sides of the connector, carried by vLLM: a plan for each step, a report back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lmkv_client.connector.vllm_api import KVConnectorMetadata, KVConnectorWorkerMetadata
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import ChunkCopy


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentChecksum:
    """An extent to compare with its checksum before it is used."""

    offset: int
    size_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedExtent:
    """A held chunk, or one part of it, of which the first tokens are computed again."""

    held: ExtentChecksum
    token_count: int
    """Tokens of the held chunk."""
    computed_count: int
    """Tokens of the chunk that is computed: all of them, or fewer if the prompt ends inside the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Extents to copy into a request's pages."""

    request_id: str
    copies: list[ChunkCopy]
    sync: bool
    """Whether the step's forward needs the pages. Never with `all_or_none`."""
    final: bool
    """Whether it is the request's last plan."""
    checks: list[ExtentChecksum]
    """Extents to verify first; empty unless `verify_loads` is on."""
    failed_blocks: list[int]
    """Pages that will not be filled; vLLM computes them instead. Empty with `all_or_none`."""
    all_or_none: bool = False
    """Whether vLLM computes the whole request if the load fails, and not the pages that are not filled."""
    buffered: list[ChunkCopy] = field(default_factory=list)
    """As `copies`, of extents in the device buffer."""
    failed: bool = False
    """Set with `final` and `all_or_none` if the rest cannot be loaded."""


@dataclass(kw_only=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler side to worker side, once a step."""

    attachment: Attachment | None = None
    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[ChunkCopy] = field(default_factory=list)
    tails: dict[str, list[ChunkCopy]] = field(default_factory=dict)
    """Stores of finished requests, whose pages vLLM keeps until each worker reports that it is done with them: also
    without copies."""
    audits: dict[int, AuditedExtent] = field(default_factory=dict)
    """Held chunks to compare with what is written now; the key is the offset of the extent that is written."""


class LayerError(NamedTuple):
    """How much the KV of one layer of a chunk differs from that of the same chunk computed again."""

    mean: float
    """The root mean square of the differences, as a share of that of the values."""
    most: float
    """The largest difference, as a share of the value and the root mean square of all values."""


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The comparison of a held chunk with the same chunk computed again, joined from all ranks."""

    layers: dict[int, LayerError] = field(default_factory=dict)
    """The key is the index of the layer in the part."""
    is_void: bool = False
    """Whether the held extent did not match its checksum: it was evicted and overwritten meanwhile, or is damaged."""

    def add(self, other: Comparison) -> None:
        """Adds the comparison of other ranks, which have other heads or other layers."""
        for layer, error in other.layers.items():
            known = self.layers.get(layer, error)
            self.layers[layer] = LayerError(max(error.mean, known.mean), max(error.most, known.most))
        self.is_void |= other.is_void

    @property
    def worst(self) -> LayerError:
        """The largest errors of any layer."""
        errors = self.layers.values()
        mean, most = max(error.mean for error in errors), max(error.most for error in errors)
        return LayerError(mean, most)


@dataclass(kw_only=True, slots=True)
class StoreResult:
    """The result of writing one extent, joined from all ranks; they need not write it in the same step."""

    rank_count: int = 0
    """Ranks that are done."""
    checksum: int = 0
    """Sum of the ranks' parts, modulo 2^64."""
    failed: bool = False
    """Whether some rank has not written its share."""
    comparison: Comparison | None = None
    """How it compares with the extent that it was to be compared with."""

    def add(self, other: StoreResult) -> None:
        """Adds what other ranks wrote."""
        self.rank_count += other.rank_count
        self.checksum = (self.checksum + other.checksum) & 0xFFFF_FFFF_FFFF_FFFF
        self.failed |= other.failed
        if other.comparison:
            self.comparison = self.comparison or Comparison()
            self.comparison.add(other.comparison)


@dataclass(kw_only=True, slots=True)
class LoadResult:
    """The result of one request's load, joined from all ranks; they need not end it in the same step."""

    rank_count: int = 0
    """Ranks that are done."""
    size_bytes: int = 0
    seconds: float = 0.0
    """Longest time of one rank."""
    failed: bool = False

    def add(self, other: LoadResult) -> None:
        """Adds what other ranks copied."""
        self.rank_count += other.rank_count
        self.size_bytes += other.size_bytes
        self.seconds = max(self.seconds, other.seconds)
        self.failed |= other.failed


@dataclass(kw_only=True, slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker side to scheduler side, after a step in which something was copied."""

    engine_id: str
    stores: dict[int, StoreResult] = field(default_factory=dict)
    """The key is the offset of the extent."""
    store_seconds: float = 0.0
    loaded: dict[str, LoadResult] = field(default_factory=dict)
    """The key is the request; only loads that have ended are here."""
    others: dict[str, WorkerReport] = field(default_factory=dict)
    """Reports of ranks that work for another attachment, by its engine id: they lag behind, or the first rank does."""

    @property
    def skipped(self) -> set[int]:
        """Offsets of extents that some rank has not written."""
        return {offset for offset, store in self.stores.items() if store.failed}

    def for_engine(self, engine_id: str) -> WorkerReport | None:
        """The part of the report that is about this attachment; None if the ranks have stored nothing for it."""
        return self if self.engine_id == engine_id else self.others.get(engine_id)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Joins the reports of both ranks. Stores count for the attachment that they were made for."""
        assert isinstance(other, WorkerReport)
        for request_id, load in other.loaded.items():
            self.loaded.setdefault(request_id, LoadResult()).add(load)
        other.loaded = {}
        if other.engine_id != self.engine_id:
            known = self.others.get(other.engine_id)
            self.others[other.engine_id] = known.aggregate(other) if known else other
            return self
        for offset, store in other.stores.items():
            self.stores.setdefault(offset, StoreResult()).add(store)
        self.store_seconds = max(self.store_seconds, other.store_seconds)
        return self
