"""Says where a prompt is for this node, why parts of it are not there, and what engines have reported of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from lmkv.errors import Full, KvSpecMismatch
from lmkv.internal.v1.report_service_pb2 import ExplainOrder
from lmkv.keys import ChunkKey, split_keys
from lmkv.spec import KvSpec
from lmkv.tiers import HOST, OWN
from lmkv.v1.chunk_pb2 import PromptExplanation, PromptSpan, RequestReport
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.engines.lookups import missed_span
from lmkv_server.node.sessions.session import HOLD_SHARE
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack

MAX_REPORTS = 1000
"""Reports of requests that the node keeps, the last ones."""
MAX_REPORT_BYTES = 2048
"""Size of a report that the node keeps: some 50 spans, far more than prompts have."""
MAX_LISTED = 20
"""Requests in one answer."""
MAX_RUNNING = 4
"""Explanations of prompts at a time: each may ask tiers for thousands of chunks."""


class PromptExplainer:
    """Answers `ExplainOrder`s. One event loop owns it."""

    def __init__(self, tier: HostTier, sessions: EngineSessions, stack: TierStack, start_time_ns: int) -> None:
        """`start_time_ns`: when the node started, in nanoseconds since 1970."""
        self._tier = tier
        self._sessions = sessions
        self._stack = stack
        self._start_time_ns = start_time_ns
        self._reports: deque[RequestReport] = deque(maxlen=MAX_REPORTS)
        self._running_count = 0

    def note(self, report: RequestReport) -> None:
        """Keeps what an engine reports of a request, unless that is too large."""
        if report.ByteSize() <= MAX_REPORT_BYTES:
            self._reports.append(report)

    async def explain(self, order: ExplainOrder) -> PromptExplanation:
        """The spans of the order's chunks, or the requests that it names.

        Raises `BadChunkKey`, `KvSpecMismatch` if no engine of the chunks' spec has attached, and `Full` if others are
        explained now.
        """
        found = PromptExplanation()
        found.start_time.FromNanoseconds(self._start_time_ns)
        if order.chunk_keys:
            if self._running_count >= MAX_RUNNING:
                raise Full(f"{MAX_RUNNING} prompts are being explained here already", limit=MAX_RUNNING)
            self._running_count += 1
            try:
                found.spans.extend(await self._spans(order.fingerprint, split_keys(order.chunk_keys)))
            finally:
                self._running_count -= 1
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
        spans = await (self._chunk_spans if spec.has_plain_parts else self._item_spans)(spec, keys)
        for span in spans:
            span.token_count = span.chunk_count * spec.chunk_size
        return spans

    async def _chunk_spans(self, spec: KvSpec, keys: Sequence[ChunkKey]) -> list[PromptSpan]:
        own_count = sum(1 for _ in takewhile(lambda key: self._tier.get(key) is not None, keys))
        hit = await self._stack.lookup(spec, keys, own_count)
        spans = [PromptSpan(chunk_count=own_count, tier=OWN)] if own_count else []
        spans += [PromptSpan(chunk_count=run.chunk_count, tier=run.tier) for run in hit.runs]
        missed = self._stack.diagnosis.behind(keys, own_count + hit.chunk_count, presences=hit.presences)
        return spans + [missed_span(run) for run in missed]

    async def _item_spans(self, spec: KvSpec, keys: Sequence[ChunkKey]) -> list[PromptSpan]:
        """A hit of items is all or nothing: it counts as held in the last tier that it needs."""
        lookup, budget_bytes = self._stack.begin_items(spec, keys), self._tier.size_bytes // HOLD_SHARE
        if not lookup.is_complete:
            await self._stack.ask_for_items(lookup, budget_bytes)
        found = lookup.result(budget_bytes)
        tier = found.rest.runs[-1].tier if found.rest.runs else OWN
        spans = [PromptSpan(chunk_count=found.chunk_count, tier=tier)] if found.chunk_count else []
        missed = self._stack.diagnosis.behind_items(spec, keys, found.chunk_count, unanswered=found.unanswered)
        return spans + [missed_span(run) for run in missed]
