"""Audits: chunks that the cache holds are computed again as part of a request, and both are compared.

hit  ├─ loaded ─────────────┤─ computed, though held ─┤─ not held ─┤
                             └─ compared with the held chunks, in the place of a store

An audited hit is offered to vLLM without its last full chunk and what is behind it, or sometimes without more, so that
early chunks are audited, too. Of a hit that ends inside a chunk the tokens are compared that the prompt and the held
chunk have in common. A hit that is of use only as a whole is not loaded at all. A chunk that differs by more than
rounding is suspect: so may be those before it, which were loaded. The next hit with it is not loaded at all, and the
first of its chunks that differs is wrong.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import median
from typing import Any

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.messages import Comparison, LayerError
from lmkv_client.connector.scheduler.block_copies import items_of
from lmkv_client.connector.scheduler.loads import check
from lmkv_client.connector.scheduler.pending_stores import PendingStore
from lmkv_client.connector.scheduler.request_state import Audit, HeldEnd, HeldPart, RequestLookup, RequestState
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.engine.session import Session

logger = init_logger("vllm.lmkv")

DEEP_SHARE = 1 / 16
"""Share of audits that begin at any chunk of the hit, not at the last one."""
BUDGET_SHARE = 0.01
"""Tokens that audits may compute, as a share of all that the engine computes. A rate of 1 has no such limit."""
MAX_BUDGET_CHUNKS = 64
"""Most chunks for which an engine without audits saves budget."""
MAX_SUSPECTS = 1024
MAX_SHOWN_LAYERS = 8
"""Layers in the report of a chunk, those with the largest errors."""
MAX_REPORTS = 64
"""Audits that requests have asked for of which the results are kept."""
MAX_SHOWN_KEYS = 16
OUTCOMES: Mapping[str, pb.AuditOutcome.ValueType] = {
    "equal": pb.AUDIT_OUTCOME_EQUAL,
    "suspect": pb.AUDIT_OUTCOME_SUSPECT,
    "wrong": pb.AUDIT_OUTCOME_WRONG,
    "void": pb.AUDIT_OUTCOME_VOID,
}
MIN_HONEST = 16
"""Chunks that must have been compared before the tolerance follows from them."""
MAX_HONEST = 256
"""Chunks of which the errors are kept."""
MARGIN = 8.0
"""Ratio of the tolerance to the median of honest errors."""
TOLERANCES: Mapping[str, tuple[LayerError, LayerError]] = {
    "float32": (LayerError(1e-5, 1e-4), LayerError(1e-3, 1e-2)),
    "float16": (LayerError(5e-3, 0.05), LayerError(0.1, 0.5)),
    "bfloat16": (LayerError(0.02, 0.2), LayerError(0.2, 0.5)),
    "fp8_e4m3": (LayerError(0.05, 0.5), LayerError(0.3, 1.0)),
    "fp8_e5m2": (LayerError(0.1, 0.8), LayerError(0.4, 1.5)),
}
"""The least and the greatest tolerance by KV dtype; the greatest one holds at first. Wrong KV has errors of 0.5 and
more, rounding in the last layers of a model errors of some hundredths in bfloat16."""


class Tolerance:
    """Decides which errors are rounding: those up to a multiple of the median of the errors that were seen."""

    def __init__(self, dtype: str) -> None:
        self._least, self._most = TOLERANCES[dtype]
        self._honest: deque[LayerError] = deque(maxlen=MAX_HONEST)

    @property
    def limit(self) -> LayerError:
        """The errors that are still tolerated."""
        if len(self._honest) < MIN_HONEST:
            return self._most
        seen = (MARGIN * median(errors) for errors in zip(*self._honest, strict=True))
        bounds = zip(seen, self._least, self._most, strict=True)
        return LayerError(*(min(max(one, low), high) for one, low, high in bounds))

    def covers(self, error: LayerError) -> bool:
        """Returns whether these errors are rounding. If they are, they count in the median for later chunks."""
        limit = self.limit
        if error.mean > limit.mean or error.most > limit.most:
            return False
        self._honest.append(error)
        return True


@dataclass(kw_only=True, slots=True)
class Suspicion:
    """A chunk that differed once."""

    error: LayerError
    request_id: str = ""
    """The request that computes it again, if one does."""


@dataclass(kw_only=True, slots=True)
class AuditReport:
    """The results of an audit that requests have asked for by its name."""

    chunk_count: int = 0
    """Chunks, or parts of them, whose comparison has begun."""
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=dict)
    """Chunks of the prompt that were not compared at the last request, by the reason."""
    layers: dict[tuple[int, int], LayerError] = field(default_factory=dict)
    """The largest errors, by part and layer."""
    wrong_keys: list[str] = field(default_factory=list)

    def add(self, outcome: str, part: int, comparison: Comparison | None) -> None:
        """Adds what is known of one part of a chunk."""
        self.outcomes[outcome] += 1
        for layer, error in comparison.layers.items() if comparison and not comparison.is_void else ():
            known = self.layers.get((part, layer), error)
            self.layers[part, layer] = LayerError(max(error.mean, known.mean), max(error.most, known.most))

    def shown(self) -> dict[str, Any]:
        """The results as the answer to a request has them."""
        return {
            "chunk_count": self.chunk_count,
            "pending_count": self.chunk_count - self.outcomes.total(),
            "outcomes": dict(self.outcomes),
            "skipped": self.skipped,
            "wrong_keys": self.wrong_keys,
            "layers": [
                {"part": part, "layer": layer, "mean": min(error.mean, MAX_SHOWN), "most": min(error.most, MAX_SHOWN)}
                for (part, layer), error in sorted(self.layers.items())
            ],
        }


MAX_SHOWN = 1e30
"""The largest error in an answer: JSON has no infinity."""


class Audits:
    """The audits of one engine."""

    def __init__(self, config: ConnectorConfig, session: Session[RequestLookup], *, may_audit: bool) -> None:
        """Without `may_audit` nothing is audited: an engine that stores nothing has nothing to compare. Nor are models
        with recurrent states, where what vLLM computes depends on the split of a prompt, and engines that accept
        rounded chunks.
        """
        spec = session.spec
        has_states = any(part.rule == PART_RULE_END for part in spec.parts)
        self._may_audit = may_audit and not has_states and not spec.accepts_lossy
        self._rate = config.audit_rate if self._may_audit else 0.0
        self._forced_until = 0.0
        """Every hit is audited until then."""
        self._reports: OrderedDict[str, AuditReport] = OrderedDict()
        """The results of audits that requests have asked for, by name."""
        self._session = session
        self._size = spec.chunk_size
        self._is_whole = items_of(spec).all_or_none
        """Whether hits are loaded as a whole or not at all."""
        self._tolerances = {
            index: Tolerance(part.kv_dtype) for index, part in enumerate(spec.parts) if part.kv_dtype in TOLERANCES
        }
        """The key is the index of the part; a part that is not here is not audited."""
        self._suspects: OrderedDict[ChunkKey, Suspicion] = OrderedDict()
        self._hit_count = 0
        self._budget = 0.0
        """Tokens that audits may compute now."""

    def computed(self, token_count: int) -> None:
        """A step computes this number of tokens."""
        self._budget = min(MAX_BUDGET_CHUNKS * self._size, self._budget + BUDGET_SHARE * token_count)

    def audit_all(self, seconds: float) -> None:
        """Audits every hit for this time, without a limit of tokens; 0 ends that."""
        self._forced_until = time.monotonic() + seconds if seconds > 0 else 0.0

    def report(self, name: str) -> AuditReport | None:
        """The results of an audit that requests have asked for; None if they are not kept any more."""
        return self._reports.get(name)

    def cut(self, state: RequestState, computed_count: int, hit: int) -> int:
        """The end of what is loaded of a hit that would be loaded to token `hit`; earlier if the hit is audited.

        Chosen once for each lookup. vLLM has the first `computed_count` tokens.
        """
        lookup = state.lookup
        if not lookup.audit_is_chosen:
            lookup.audit_is_chosen = True
            lookup.audit = self._choose(state, computed_count, hit)
        if lookup.audit and lookup.audit.first * self._size < computed_count:  # vLLM has got more tokens meanwhile
            lookup.audit = None
        if lookup.audit is None:
            return hit
        return computed_count if self._is_whole else lookup.audit.first * self._size

    def begin(self, state: RequestState) -> None:
        """The engine computes the rest of a request: if its hit is audited, held chunks among it are compared."""
        audit, state.lookup.audit = state.lookup.audit, None
        if audit is None:
            return
        held, end = self._held(state.lookup, audit)
        if not held and end is None:
            return
        store = state.store
        store.audit, store.held, store.held_end = audit, held, end
        store.stored_count = min(store.stored_count, audit.first)
        store.passed_count = min(store.passed_count, audit.first)
        state.account.unused = MissReason.AUDITED
        if report := self._reports.get(audit.name):
            report.chunk_count += len(held) + len(end.parts if end else ())
        else:
            self._budget -= audit.token_count
        self._session.counters.add("audited_tokens", audit.token_count)
        if audit.suspect and (suspicion := self._suspects.get(audit.suspect)):
            suspicion.request_id = state.request_id

    def judge(self, stores: Sequence[PendingStore]) -> None:
        """Judges chunks that all ranks have compared."""
        for store in sorted(stores, key=lambda store: store.index):
            self._judge(store)

    def _judge(self, store: PendingStore) -> None:
        audit, comparison = store.state.store.audit, store.result.comparison
        if audit is None or comparison is None or comparison.is_void or not comparison.layers:
            self._settle(store, "void")
            return
        error = comparison.worst
        if self._tolerances[store.part].covers(error):
            self._suspects.pop(store.key, None)
            self._settle(store, "equal")
        elif not audit.suspect:
            self._suspect(store, error)
            self._settle(store, "suspect")
        elif not audit.is_over:
            audit.is_over = True  # chunks behind a wrong one may be wrong, too
            self._settle(store, "wrong", self._wrong(store))
        elif report := self._reports.get(audit.name):
            report.add("behind", store.part, comparison)

    def _settle(self, store: PendingStore, outcome: str, wrong_keys: Sequence[ChunkKey] = ()) -> None:
        """Counts a chunk, and reports it to the node."""
        state, held, comparison = store.state, store.held, store.result.comparison
        name = state.store.audit.name if state.store.audit else ""
        if report := self._reports.get(name):
            report.add(outcome, store.part, comparison)
            report.wrong_keys += [key.hex() for key in wrong_keys[: MAX_SHOWN_KEYS - len(report.wrong_keys)]]
        layers = sorted(comparison.layers.items(), key=lambda item: -item[1].mean) if comparison else []
        chunk = pb.AuditedChunk(
            chunk_key=store.key,
            part=store.part,
            first_token=store.index * self._size,
            token_count=store.token_count,
            tier=held.tier if held else "",
            layers=[
                pb.LayerDifference(layer=layer, mean=error.mean, most=error.most)
                for layer, error in layers[:MAX_SHOWN_LAYERS]
            ],
            engine_request_id=state.request_id,
            lora_identity=state.adapter.identity if state.adapter else "",
            has_media=bool(state.extras),
            is_requested=bool(name),
        )
        self._session.counters.add("audited_chunks", label=outcome)
        self._session.report_audit(OUTCOMES[outcome], chunk, wrong_keys)

    def finished(self, state: RequestState) -> None:
        """A request has ended: another one may compute what it has not."""
        audit = state.store.audit
        if audit and audit.suspect and (suspicion := self._suspects.get(audit.suspect)):
            suspicion.request_id = ""

    def _choose(self, state: RequestState, computed_count: int, hit: int) -> Audit | None:
        is_handoff = state.handoff_id or state.is_handed_off
        is_forced = time.monotonic() < self._forced_until
        rate = 1.0 if is_forced else self._rate
        if not self._may_audit or is_handoff or not state.store.may_store or self._session.attachment is None:
            return None
        if state.audit_name:
            return self._choose_named(state, computed_count)
        if not rate:
            return None
        first, stop = -(-computed_count // self._size), -(-hit // self._size)
        if first >= stop:
            return None
        full_count = min(stop, state.lookup.tokens_in(state.lookup.hit_count()) // self._size)
        keys = state.lookup.hit_keys[:stop]
        if suspect := self._suspect_in(keys[first:]):
            return Audit(first=first, token_count=hit - first * self._size, suspect=suspect)
        self._hit_count += 1
        drawn = sha256(keys[-1] + self._hit_count.to_bytes(8, "little")).digest()
        sampled, deep, place = (int.from_bytes(drawn[at : at + 8], "little") / 2**64 for at in (0, 8, 16))
        in_pool = not state.lookup.absent_count or (not self._is_whole and len(state.lookup.chunks) >= stop)
        if sampled >= rate or not in_pool:
            return None
        if not self._is_whole:
            first = first + int(place * (stop - first)) if deep < DEEP_SHARE else max(first, full_count - 1)
        token_count = hit - first * self._size
        is_affordable = rate == 1 or token_count <= self._budget
        return Audit(first=first, token_count=token_count) if is_affordable else None

    def _choose_named(self, state: RequestState, computed_count: int) -> Audit | None:
        """The audit of a request that asks for one: of all that the pool holds and vLLM has not, at the first request
        of its name and at those after which a chunk is suspect."""
        first, lookup = -(-computed_count // self._size), state.lookup
        held_count = lookup.hit_count(pool_only=True)
        end = lookup.tokens_in(held_count)
        stop = -(-end // self._size)
        suspect = self._suspect_in(lookup.hit_keys[first:stop])
        report = self._reports.get(state.audit_name)
        if report and report.chunk_count and not suspect:
            return None
        if report is None:
            report = self._reports[state.audit_name] = AuditReport()
            while len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)
        elsewhere_count = lookup.hit_count() - held_count
        reasons = {
            "in the pages of the engine": min(first, stop),
            "not in the pool": elsewhere_count,
            "not held": max(0, state.full_count - stop - elsewhere_count),
            "shorter than a chunk": int(stop + elsewhere_count <= state.full_count and not state.ends_with_a_chunk),
        }
        report.skipped = {reason: count for reason, count in reasons.items() if count}
        if first >= stop:
            return None
        return Audit(first=first, token_count=end - first * self._size, suspect=suspect, name=state.audit_name)

    def _suspect_in(self, keys: Sequence[ChunkKey]) -> ChunkKey | None:
        """A suspect among these keys that no request computes now."""
        if not self._suspects:
            return None
        return next((key for key in keys if (known := self._suspects.get(key)) and not known.request_id), None)

    def _held(self, lookup: RequestLookup, audit: Audit) -> tuple[dict[tuple[int, int], HeldPart], HeldEnd | None]:
        """The chunks in the pool that are computed again and can be compared: the full ones by part and index, and the
        one in which the hit ends."""
        size, spec = self._size, self._session.spec
        full_count, rest_count = divmod(lookup.tokens_in(lookup.hit_count()), size)
        held, end = {}, {}
        for item, chunk in zip(spec.items(full_count, rest_count), lookup.chunks, strict=False):
            if item.chunk < audit.first or item.part not in self._tolerances:
                continue
            tier = lookup.sources.tier_at(item.chunk * size, size)
            part = HeldPart(extent=check(chunk), token_count=chunk.token_count, tier=tier, peer_id=lookup.peer_id)
            if item.chunk < full_count:
                held[item.part, item.chunk] = part
            elif chunk.token_count >= rest_count:
                end[item.part] = part
        if not end:
            return held, None
        return held, HeldEnd(key=lookup.hit_keys[full_count], index=full_count, token_count=rest_count, parts=end)

    def _suspect(self, store: PendingStore, error: LayerError) -> None:
        self._suspects[store.key] = Suspicion(error=error)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        logger.warning(
            "[%s] chunk %s differs from what was computed, by %.2g on average and %.2g at most; the next hit with it "
            "is computed",
            store.state.request_id,
            store.key.hex(),
            error.mean,
            error.most,
        )

    def _wrong(self, store: PendingStore) -> list[ChunkKey]:
        """Logs a chunk that has differed twice; returns its key, and those of the chunks behind it in the prompt."""
        state = store.state
        ends = [state.lookup.partial.key] if state.lookup.partial else []
        ends += [state.partial_key] if state.partial_key else []
        keys = list(dict.fromkeys([store.key, *state.chain.keys[store.index :], *ends]))
        for key in keys:
            self._suspects.pop(key, None)
        logger.error(
            "[%s] chunk %s is wrong: computed twice, it differs from what the cache holds. It and those behind it are "
            "dropped everywhere; the record is in the log of the node",
            state.request_id,
            store.key.hex(),
        )
        return keys
