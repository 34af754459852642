"""Says where a prompt is for this node, why parts of it are not there, and what engines have reported of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lmkv.errors import KvSpecMismatch
from lmkv.internal.v1.report_service_pb2 import ExplainOrder
from lmkv.keys import ChunkKey, split_keys
from lmkv.prompt import Prompt
from lmkv.runtime.turns import Slots
from lmkv.tiers import HOST, OWN
from lmkv.v1.chunk_pb2 import PromptExplanation, PromptSpan, RequestReport
from lmkv_server.node.engines.lookups import missed_span
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

MAX_REPORTS = 1000
"""Maximum number of reports of requests that the node keeps."""
MAX_REPORT_BYTES = 2048
"""Size of a report that the node keeps: some 50 spans, far more than prompts have."""
MAX_LISTED = 20
"""Requests in one answer."""
MAX_RUNNING = 4
"""Explanations of prompts at a time: each may ask tiers for thousands of chunks. Others wait, as few of each
coordinator as it asks for at a time."""


class PromptExplainer:
    """Answers `ExplainOrder`s. One event loop owns it."""

    def __init__(self, sessions: EngineSessions, stack: TierStack, start_time_ns: int) -> None:
        """`start_time_ns`: when the node started, in nanoseconds since 1970."""
        self._sessions = sessions
        self._stack = stack
        self._start_time_ns = start_time_ns
        self._reports: deque[RequestReport] = deque(maxlen=MAX_REPORTS)
        self._slots = Slots(MAX_RUNNING)

    def note(self, report: RequestReport) -> None:
        """Keeps what an engine reports of a request, unless that is too large."""
        if report.ByteSize() <= MAX_REPORT_BYTES:
            self._reports.append(report)

    async def explain(self, order: ExplainOrder) -> PromptExplanation:
        """The spans of the order's chunks, or the requests that it names.

        Raises `BadChunkKey`, and `KvSpecMismatch` if no engine of the chunks' spec has attached.
        """
        found = PromptExplanation()
        found.start_time.FromNanoseconds(self._start_time_ns)
        if order.chunk_keys:
            async with self._slots.take(""):  # orders do not say which coordinator they are of
                found.spans.extend(await self._spans(order.fingerprint, split_keys(order.chunk_keys)))
        elif order.engine_request_id:
            named = [
                report for report in reversed(self._reports) if order.engine_request_id in report.engine_request_id
            ]
            found.requests.extend(named[:MAX_LISTED])
        for span in (*found.spans, *(span for report in found.requests for span in report.spans)):
            if span.tier == OWN:  # `own` only to the node's engines
                span.tier = HOST
        return found

    async def _spans(self, fingerprint: bytes, keys: Sequence[ChunkKey]) -> list[PromptSpan]:
        spec = self._sessions.spec(fingerprint)
        if spec is None:
            raise KvSpecMismatch(f"no engine of fingerprint {fingerprint.hex()} has attached here", field="fingerprint")
        prompt = Prompt(spec, keys)
        found = await self._stack.find(prompt)
        spans = [PromptSpan(chunk_count=count, tier=tier) for count, tier in _places(found) if count]
        missed = self._stack.diagnosis.behind(prompt, found.chunk_count, unanswered=found.unanswered)
        spans += [missed_span(run) for run in missed]
        for span in spans:
            span.token_count = span.chunk_count * spec.chunk_size
        return spans


def _places(found: Found) -> list[tuple[int, str]]:
    """Chunks and their tiers. A hit that is all or nothing counts as held in the last tier that it needs."""
    if found.prompt.spec.matches_prefixes:
        return [(len(found.own), OWN), *((run.chunk_count, run.tier) for run in found.runs)]
    return [(found.chunk_count, found.runs[-1].tier if found.runs else OWN)]
