"""A worker whose KV is simulated: a number per token that depends on every token before it.

Each of vLLM's KV-cache groups has numbers of its own. A recurrent state is the number of the last token that is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from lmkv_client.connector.messages import (
    AuditedExtent,
    Comparison,
    LayerError,
    LoadPlan,
    LoadResult,
    StepPlan,
    StoreResult,
    WorkerReport,
)
from lmkv_kernels import ChunkCopy
from tests.client.connector.scripted_chunks import SPOILT, Pool
from tests.client.connector.scripted_node import ScriptedNode
from tests.client.connector.simulated_models import BLOCK

NULL_PAGE = 0
VOCAB = 500


def kv_values(tokens: Sequence[int], salt: str = "") -> Iterator[int]:
    """The KV of each token: depends on all tokens before it."""
    value = hash(("root", salt))
    for token in tokens:
        value = hash((value, token)) & 0x7FFF_FFFF_FFFF_FFFF
        yield value


def seen(request: Request) -> list[int]:
    """A request's tokens as the model sees them: where an image lies, the image and not its placeholder."""
    tokens = list(request.all_token_ids)
    for feature in request.mm_features:
        place = feature.mm_position
        for at in range(place.offset, place.offset + place.length):
            tokens[at] = hash((feature.data["pixel_values"].data.numpy().tobytes(), at - place.offset))
    return tokens


def content_of(name: str) -> MultiModalKwargsItem:
    """What vLLM's processor makes of the image of this name."""
    pixels = torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8).to(torch.float32)
    return MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalSharedField(batch_size=1))})


def next_token(value: int) -> int:
    """What the simulated model says after a token with this KV."""
    return value % VOCAB


def answer_of(prompt: Sequence[int], count: int, salt: str = "") -> list[int]:
    """What an engine without any cache says to the prompt."""
    tokens = list(prompt)
    value = list(kv_values(tokens, salt))[-1]
    said = []
    for _ in range(count):
        said.append(next_token(value))
        value = hash((value, said[-1])) & 0x7FFF_FFFF_FFFF_FFFF
    return said


@dataclass
class Copying:
    """One rank's load: copies that were not made yet, and what became of the others."""

    copies: list[tuple[Pool, ChunkCopy]] = field(default_factory=list)
    failed_blocks: list[int] = field(default_factory=list)
    all_or_none: bool = False
    final: bool = False
    failed: bool = False
    lost: bool = False
    steps_left: int = 0


class SimulatedWorker:
    """One rank, as `WorkerSide` promises to be, with numbers for bytes."""

    def __init__(self, rank: int, node: ScriptedNode, slots: Sequence[int] = (BLOCK,)) -> None:
        """`slots`: those of a page of each group."""
        self.rank = rank
        self.node = node
        self.state_index: dict[str, dict[int, int]] = {}
        """By request and group: which of its pages has its recurrent state."""
        self._slots = slots
        self._pages: dict[int, list[int]] = {}
        self.steps_per_load = 0
        """Steps that an asynchronous load takes after all of it is known."""
        self.fails_loads = False
        self.skips_stores = False
        self.reports_late = False
        """Whether stores end beside the next step, and are reported after it."""
        self._running_stores: dict[int, StoreResult] = {}
        self._loads: dict[str, Copying] = {}
        self._engine_id = ""
        self._pool: Pool = {}
        self._poisoned = False
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._stored_requests: set[str] = set()
        self._report: WorkerReport | None = None

    @property
    def load_count(self) -> int:
        """Loads that run."""
        return len(self._loads)

    def page(self, block_id: int, group: int = 0) -> list[int]:
        """The slots of one page. All groups share the memory: what another kind of layers has left there is void."""
        page = self._pages.get(block_id)
        if page is None or len(page) != self._slots[group]:
            page = self._pages[block_id] = [SPOILT] * self._slots[group]
        return page

    def clear_page(self, block_id: int) -> None:
        """Discards what is in a page."""
        self._pages.pop(block_id, None)

    def release_pages(self) -> None:
        """Frees the memory of all pages, once loads do not write to it any more."""
        for copying in self._loads.values():
            self.copy(copying)
        self._pages.clear()

    def copy_page(self, source: int, target: int) -> None:
        self._pages[target] = list(self._pages[source])

    def slots(self, copy: ChunkCopy) -> Iterator[tuple[list[int], int]]:
        """The page and the slot of each row of a copy. A state is one row."""
        size = self._slots[copy.group]
        stop = copy.first_slot + (1 if size == 1 else copy.token_count)
        assert len(copy.block_ids) == -(-stop // size)
        assert NULL_PAGE not in copy.block_ids, "a null page is copied"
        for at in range(copy.first_slot, stop):
            yield self.page(copy.block_ids[at // size], copy.group), at % size

    def load(self, plan: StepPlan) -> None:
        """Before the forward if it needs the pages at once, else after it."""
        if plan.attachment and plan.attachment.engine_id != self._engine_id:
            for copying in self._loads.values():
                self.copy(copying)
            self._engine_id = plan.attachment.engine_id
            self._pool = self.node.pools[plan.attachment.epoch]
            self._running_stores = {}
        self._poisoned = False
        for load in plan.loads:
            copying = self._loads.setdefault(load.request_id, Copying(steps_left=self.steps_per_load))
            copying.copies += [(self._pool, copy) for copy in load.copies]
            copying.failed_blocks += load.failed_blocks
            copying.all_or_none = load.all_or_none
            copying.final |= load.final
            copying.lost |= load.failed
            assert not (load.failed and not load.final)
            if load.sync:
                assert load.final, "a synchronous load is complete in its step"
                self._end(load)

    def _end(self, load: LoadPlan) -> None:
        copying = self._loads.pop(load.request_id)
        self._done(load.request_id, copying)
        self._poisoned |= bool(copying.failed_blocks)

    def copy(self, copying: Copying) -> None:
        """Fills pages from the pool, or fails to."""
        for pool, copy in copying.copies:
            content = pool.get(copy.offset, {}).get((self.rank, copy.group))
            for index, (page, slot) in enumerate(self.slots(copy), copy.first_token):
                page[slot] = SPOILT if content is None or self.fails_loads else content[index]
            if self.fails_loads:
                copying.failed_blocks += copy.block_ids
                copying.failed = True
        copying.copies.clear()

    def _done(self, request_id: str, copying: Copying) -> None:
        self.copy(copying)
        if not copying.all_or_none:
            self._failed_blocks |= set(copying.failed_blocks)
        elif copying.failed or copying.lost:
            self._failed_requests.add(request_id)
        self._reporting().loaded[request_id] = LoadResult(rank_count=1, seconds=0.001, failed=copying.failed)

    def store(self, plan: StepPlan) -> None:
        """Copies pages into the pool, before they can change."""
        tails = [copy for copies in plan.tails.values() for copy in copies]
        self._stored_requests.update(plan.tails)
        for copy in [*plan.stores, *tails]:
            report = self._reporting()
            if self._poisoned or self.skips_stores:
                report.stores[copy.offset] = StoreResult(rank_count=1, failed=True)
                continue
            assert copy.first_token == 0
            assert copy.token_count == copy.extent_tokens
            content = [page[slot] for page, slot in self.slots(copy)]
            self._pool[copy.offset][self.rank, copy.group] = content
            written = report.stores.setdefault(copy.offset, StoreResult(rank_count=1, checksum=0))
            if audited := plan.audits.get(copy.offset):
                written.comparison = written.comparison or Comparison()
                held = self._pool[audited.held.offset][self.rank, copy.group]
                written.comparison.add(self._compare(content, held, audited))
            else:
                written.checksum = (written.checksum + sum(content)) % 2**64

    def _compare(self, fresh: list[int], held: list[int], audited: AuditedExtent) -> Comparison:
        """As the worker side: numbers that differ differ without bound, and what was overwritten says nothing. Both
        have the last tokens of their chunk, and those are compared that both have."""
        behind = audited.token_count - audited.computed_count
        held = held[: len(held) - behind]
        count = min(len(fresh), len(held))
        fresh, held = fresh[len(fresh) - count :], held[len(held) - count :]
        error = 0.0 if fresh == held else math.inf
        return Comparison(layers={0: LayerError(error, error)}, is_void=SPOILT in held)

    def result(self) -> KVConnectorOutput:
        """What vLLM collects from the worker after the step."""
        finished = set()
        for request_id, copying in list(self._loads.items()):
            if not copying.final:
                continue
            if copying.steps_left:
                copying.steps_left -= 1
                continue
            del self._loads[request_id]
            self._done(request_id, copying)
            finished.add(request_id)
        stored, self._stored_requests = self._stored_requests, set()
        failed, self._failed_blocks = self._failed_blocks, set()
        failed_requests, self._failed_requests = self._failed_requests, set()
        self._end_stores()
        report, self._report = self._report, None
        return KVConnectorOutput(
            finished_sending=stored or None,
            finished_recving=finished or None,
            invalid_block_ids=failed,
            failed_recving=failed_requests,
            kv_connector_worker_meta=report,
        )

    def _end_stores(self) -> None:
        ended, self._running_stores = self._running_stores, {}
        if self.reports_late and self._report:
            self._running_stores, self._report.stores = self._report.stores, {}
        if ended:
            self._reporting().stores.update(ended)

    def _reporting(self) -> WorkerReport:
        if self._report is None:
            self._report = WorkerReport(engine_id=self._engine_id)
        return self._report
