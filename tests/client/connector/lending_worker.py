"""An engine's worker sides in a process of their own, which lend their parts of a device buffer, and take orders.

There is no CUDA device here: its pages, and so the buffer, are in host memory, which takes the device's place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_kernels import ChunkCopy
from tests.support.ordered_process import OrderedProcess
from tests.support.specs import small_spec

if TYPE_CHECKING:
    from lmkv_client.engine.attachment import Attachment

BLOCK, BLOCKS = 32, 64
SPEC = small_spec(model_name="m", model_id="m@1", head_size=16, chunk_size=256, block_size=BLOCK, vocab_size=0)
"""Its chunks have 128 KiB."""


class LendingWorkers(OrderedProcess):
    """The process: the ranks of one engine after the other, since to import vLLM takes seconds."""

    def __init__(self) -> None:
        super().__init__(_start())

    def attach(self, attachment: Attachment, rank_count: int) -> None:
        """Attaches the workers, in a new process if a test killed the last one. The node may get their parts later."""
        if self._process.poll() is not None:
            self.close()
            self._process = _start()
        self.ask(json.dumps(["attach", rank_count, asdict(attachment)]))

    def detach(self) -> None:
        """Ends that, unless the process is gone."""
        self._process.send_signal(signal.SIGCONT)
        if self._process.poll() is None:
            self.ask(json.dumps(["detach"]))

    def loaded_sums(self, chunks: Sequence[HeldChunk]) -> list[int]:
        """Loads these chunks into the ranks' pages; the checksums of what is there."""
        sums: list[int] = self.ask(
            json.dumps(["load", [(one.extent.region, one.extent.offset, one.token_count) for one in chunks]])
        )
        return sums


def _start() -> subprocess.Popen[str]:
    program = "from tests.client.connector.lending_worker import work; work()"
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
    )


def work() -> None:
    """What the process does: carries out orders until its standard input ends."""
    from lmkv_client.engine.attachment import Attachment

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes elsewhere
    ranks: list[Rank] = []
    for line in sys.stdin:
        answer: Any = None
        match json.loads(line):
            case ["attach", rank_count, fields]:
                ranks = [Rank(rank, rank_count, Attachment(**fields)) for rank in range(rank_count)]
            case ["load", extents]:
                parts = [rank.load(extents) for rank in ranks]
                answer = [sum(sums) % 2**64 for sums in zip(*parts, strict=True)]
            case ["detach"]:
                for rank in ranks:
                    rank.worker.close()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # to take vLLM apart takes seconds, too


class Rank:
    """One rank, in the process."""

    def __init__(self, rank: int, rank_count: int, attachment: Attachment) -> None:
        import torch

        from lmkv_client.connector.engine_kv import LayerGroup
        from lmkv_client.connector.identity import head_shares
        from lmkv_client.connector.messages import StepPlan
        from lmkv_client.connector.worker.side import WorkerSide

        shape = (BLOCKS, SPEC.kv_head_count // rank_count, BLOCK, 2 * SPEC.head_size)
        caches = {str(layer): torch.zeros(shape) for layer in range(SPEC.layer_count)}
        self.worker = WorkerSide(
            SPEC,
            head_shares(SPEC, rank, rank_count),
            groups=[LayerGroup(part=0, block_size=BLOCK, layer_names=tuple(caches))],
            rank=rank,
            threads=1,
            buffer_backends=("UCX",),
        )
        self.worker.register(caches)
        self.worker.load(StepPlan(attachment=attachment))
        self._attachment = attachment

    def load(self, extents: Sequence[tuple[int, int, int]]) -> list[int]:
        """Loads chunks by region, offset and tokens; what its words in the pages add to their checksums."""
        from lmkv_client.connector.messages import LoadPlan, StepPlan
        from lmkv_kernels import gather

        by_region: dict[int, list[ChunkCopy]] = {0: [], 1: []}
        for index, (region, offset, tokens) in enumerate(extents):
            by_region[region].append(whole_chunk(index, offset, tokens))
        load = LoadPlan(
            request_id="r",
            copies=by_region[0],
            buffered=by_region[1],
            sync=True,
            final=True,
            checks=[],
            failed_blocks=[],
        )
        self.worker.load(StepPlan(attachment=self._attachment, loads=[load]))
        report = self.worker.take_report()
        assert report
        assert not report.loaded["r"].failed
        copies = [whole_chunk(index, 0, tokens) for index, (_, _, tokens) in enumerate(extents)]
        return [gather(self.worker._pages[0], bytearray(SPEC.chunk_bytes), [copy])[0] for copy in copies]


def whole_chunk(index: int, offset: int, tokens: int) -> ChunkCopy:
    """A chunk of a prompt whose blocks lie one after the other."""
    first = index * (SPEC.chunk_size // BLOCK)
    block_ids = range(first, first + -(-tokens // BLOCK))
    return ChunkCopy(offset=offset, extent_tokens=tokens, token_count=tokens, block_ids=block_ids)
