"""Keeps the state that an engine shares with its node: lookups and their chunks, write credits, reports. Sans-IO.

Two drivers use a `Session`: vLLM's scheduler side in the engine's steps, and the `Dispatcher` of the engine API for
callers on any thread. A driver sends through the session, passes the time in, and handles what `Session.events` yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from lmkv import rpc, telemetry
from lmkv.config import ConnectorConfig
from lmkv.keys import KEY_BYTES, ChunkKey, Tokens, join_keys
from lmkv.misses import MissReason, reason_name
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv.runtime.patience import Suspicion, worth_seconds
from lmkv.spec import KvSpec
from lmkv.telemetry import NO_SPAN, Span, SpanKind
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.attachment import Attachment
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.hit_sources import HitSources
from lmkv_client.engine.log import logger
from lmkv_client.engine.node.client import Identified, NodeClient, NodeLost
from lmkv_client.engine.prompt_account import PromptAccount, PromptAccounts
from lmkv_client.engine.speeds import PrefillQueue, PrefillRate
from lmkv_client.engine.write_credits import KEPT_WHEN_IDLE, PartCredits

MAX_ASKED_KEYS = MAX_MESSAGE_BYTES // 2 // KEY_BYTES
"""Most chunks of a prompt in one lookup, so that it fits into a message; the others are computed."""
OTHER_BYTES = 64 << 10
"""Room in the message of a lookup for everything but keys and tokens."""
TOKEN_BYTES = 4
NO_SOURCES = HitSources()


class LookupState(Enum):
    """The state of a lookup.

    ASKED ──answer──► FOUND ──load──► LOADING ──its end──► FOUND ──release──► OVER
      └──time-out, nothing found, node lost──► OVER
    """

    ASKED = auto()
    """The node has not answered yet."""
    FOUND = auto()
    """The node holds `chunks` for the engine."""
    LOADING = auto()
    """As FOUND, while absent chunks are brought into the pool."""
    OVER = auto()
    """The node holds nothing, and the engine expects no answer. One may arrive all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialChunk:
    """A stored chunk that is not full: tokens behind the full chunks before it."""

    key: ChunkKey
    index: int
    """The number of full chunks before it."""
    token_count: int


@dataclass(kw_only=True, eq=False, slots=True)
class Lookup:
    """One lookup of a prompt, from the question to the release of what the node holds for it.

    If chunks have several parts, `chunks`, `absent_count` and indices of loads count items of the hit.
    """

    keys: Sequence[ChunkKey] = ()
    """The keys to look up."""
    account: PromptAccount
    tokens: Tokens | None = None
    """The prompt's tokens find partial chunks that other prompts have stored; without them only `keys` are found."""
    root: bytes = b""
    """The root of the keys; only needed with `tokens`."""
    extras: Mapping[int, bytes] = field(default_factory=dict)
    """Inputs of the keys other than tokens, by index of the chunk; only needed with `tokens`."""
    handoff_id: str = ""
    worth_seconds: float = 0.0
    """The time that the answer is worth; 0 if that is not known."""
    prefill_tokens_per_second: int = 0
    """Chunks that are fetched more slowly are not offered; 0: all are."""
    lookup_id: str = ""
    state: LookupState = LookupState.OVER
    asked_at: float = 0.0
    found_at: float = 0.0
    chunks: list[pb.HeldChunk] = field(default_factory=list)
    """The first chunks of the hit, those in the node's pool."""
    absent_count: int = 0
    """Chunks behind these that a load can bring."""
    sources: HitSources = NO_SOURCES
    """The tiers that had the chunks of the hit."""
    partial: PartialChunk | None = None
    """The partial chunk at the end of the hit, unless it is the prompt's own."""
    peer_id: str = ""
    span: Span = NO_SPAN

    @property
    def is_over(self) -> bool:
        """Whether the node holds nothing for it, and no answer is expected."""
        return self.state is LookupState.OVER

    @property
    def hit_keys(self) -> list[ChunkKey]:
        """The keys of the chunks of the hit, and of those behind it unless it ends with a partial chunk."""
        found = self.partial
        return [*self.keys[: found.index], found.key] if found else list(self.keys)

    def tokens_in(self, chunk_count: int) -> int:
        """Tokens of the prompt in the first `chunk_count` chunks of the hit."""
        size, found = self.account.chunk_size, self.partial
        if found and chunk_count > found.index:
            return found.index * size + found.token_count
        return min(chunk_count * size, self.account.token_count)

    def answer(self, found: pb.FoundChunks, now: float) -> None:
        """Records the node's answer; a lookup that found nothing is over."""
        sources = HitSources.of_answer(found)
        self.partial = None
        if found.partial_key:
            self.partial = PartialChunk(
                key=ChunkKey(found.partial_key),
                index=sources.chunk_count - 1,
                token_count=found.partial_token_count,
            )
        self.chunks, self.absent_count, self.sources = list(found.own), sources.absent_count, sources
        self.peer_id, self.found_at, self.state = found.peer_instance_id, now, LookupState.FOUND
        if found.missed:
            self.span.set(miss_reasons=[reason_name(span.reason) for span in found.missed])
        self._end_span(sources)
        if not self.chunks and not self.absent_count:
            self.end()

    def fail(self, reason: str, text: str) -> None:
        """Ends a lookup that has no answer."""
        self.span.fail(reason, text)
        self._end_span(NO_SOURCES)
        self.end()

    def end(self) -> None:
        """Ends the lookup: the node holds nothing for it any more."""
        if self.state is LookupState.ASKED:
            self.span.fail("unanswered", "the request or the node was gone before the answer came")
            self._end_span(NO_SOURCES)
        self.state = LookupState.OVER
        self.chunks = []
        self.absent_count = 0

    def _end_span(self, sources: HitSources) -> None:
        tokens = sources.tokens(0, self.tokens_in(sources.chunk_count), self.account.chunk_size)
        self.span.set(**{f"{tier}_tokens": count for tier, count in tokens.items()})
        self.span.set(peer_instance_id=self.peer_id)
        self.span.end()
        self.span = NO_SPAN


L = TypeVar("L", bound=Lookup)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionEvent(Generic[L]):
    """A driver has to handle these events, of the node or of the connection to it.

    `kind` is that of `lmkv.v1.Event`, or one of `attached`, `identified`, `lost`, or `late` for an answer that its
    lookup does not wait for any more.
    """

    kind: str
    message: Any = None
    """The event; of `attached` the `Attachment`, of `lost` the lookups that have ended by it."""
    lookup: L | None = None
    """The lookup that it is about; None if that is unknown."""


class Session(Generic[L]):
    """All that one engine has asked of its node, over all attachments. Not thread-safe.

    `L` is the driver's own kind of `Lookup`, with the driver's fields.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        spec: KvSpec,
        client: NodeClient,
        counters: Counters,
        *,
        kept_when_idle: int = KEPT_WHEN_IDLE,
    ) -> None:
        """`kept_when_idle`: most write credits for each part that the engine keeps while it is idle."""
        self.spec = spec
        """The engine's spec from now on; `change_weights` changes it."""
        self.client = client
        self.counters = counters
        self.accounts = PromptAccounts(counters)
        self.prefill = PrefillRate(spec.chunk_size)
        self.queue = PrefillQueue()
        self.attachment: Attachment | None = None
        self.welcome = pb.Welcome()
        """The latest welcome of a node."""
        self._config = config
        self._kept_when_idle = kept_when_idle
        self.credits = self._no_credits()
        self._suspicion = Suspicion()
        self._number = 0
        self._lookups: dict[str, L] = {}
        """The key is the id; a lookup leaves when it is released, or answered in vain."""

    def __len__(self) -> int:
        """Lookups that the node holds something for, or has not answered."""
        return len(self._lookups)

    @property
    def lookups(self) -> list[L]:
        """The lookups that the node holds something for, or has not answered."""
        return list(self._lookups.values())

    # ---- acts

    def send(self, *acts: pb.Act) -> None:
        """Sends to the attached node, if there is one; acts for a lost node are not valid for the next."""
        if self.attachment is not None:
            self.client.send(self.attachment, *acts)

    def worth_of(self, token_count: int) -> float:
        """The seconds that a lookup is worth which may save computing this number of tokens."""
        return worth_seconds(token_count, self.prefill.tokens_per_second, self._config.max_lookup_timeout)

    def computing_seconds(self, request_id: str, token_count: int, now: float) -> float:
        """The seconds that computing this number of the request's tokens costs it and others; 0 if not known."""
        return self.queue.seconds(request_id, token_count, self.prefill.tokens_per_second, now)

    def computing_rate(self, request_id: str, token_count: int, now: float) -> int:
        """The tokens per second at which an engine without other requests would be as long; 0 if not known."""
        seconds = self.computing_seconds(request_id, token_count, now)
        return max(1, round(token_count / seconds)) if seconds else 0

    def look_up(self, lookup: L, now: float, *, traceparent: str | None = "", wanted: Sequence[int] = ()) -> bool:
        """Sends a lookup with a request for as many write credits as are missing of those `wanted`, by part.

        Returns False, and the account says why, if there are no keys, or the node is suspect. `traceparent` is the
        parent of the lookup's span.
        """
        reason = MissReason.LOOKUP_TIMEOUT
        if not lookup.keys and (lookup.tokens is None or not lookup.tokens.size):
            reason = MissReason.UNCACHEABLE
        elif self.attachment is None:
            reason = MissReason.NODE_LOST
        elif self._suspicion.concerns(lookup.worth_seconds, now):
            reason = MissReason.NODE_SUSPECT
        lookup.account.unanswered(reason)
        if reason is not MissReason.LOOKUP_TIMEOUT:
            lookup.end()
            return False
        self._number += 1
        lookup.lookup_id, lookup.state, lookup.asked_at = str(self._number), LookupState.ASKED, now
        self._lookups[lookup.lookup_id] = lookup
        lookup.span = telemetry.begin(
            "lmkv.lookup", parent=traceparent, kind=SpanKind.CLIENT, asked_tokens=lookup.account.token_count
        )
        self.send(pb.Act(lookup=_message(lookup, self.credits.request(wanted) if wanted else ())))
        return True

    def time_out(self, lookup: L, seconds: float, now: float) -> None:
        """Records that a lookup was not answered within this time. Its answer may still arrive."""
        self.counters.add("lookup_timeouts")
        self._suspicion.timed_out(lookup.asked_at, now)
        lookup.fail("timeout", f"no answer within {seconds:.3g} s (lookup_timeout)")

    def load(self, lookup: L, first_chunk: int, chunk_count: int, seconds: float, *, traceparent: str = "") -> None:
        """Asks the node to bring absent chunks into its pool, in this time."""
        lookup.state = LookupState.LOADING
        load = pb.LoadChunks(
            lookup_id=lookup.lookup_id, first_chunk=first_chunk, chunk_count=chunk_count, traceparent=traceparent
        )
        load.timeout.FromNanoseconds(int(seconds * 1e9))
        self.send(pb.Act(load=load))

    def release(self, lookup: L, *, load_seconds: float = 0.0, avoided_seconds: float = 0.0) -> None:
        """Releases what the node holds for a lookup; a pending answer is released when it arrives. Idempotent.

        After a load, reports the time that it took and that computing would have taken, if that is known.
        """
        if lookup.state in (LookupState.FOUND, LookupState.LOADING):
            self._lookups.pop(lookup.lookup_id, None)
            release = pb.ReleaseChunks(lookup_id=lookup.lookup_id)
            if avoided_seconds:
                release.load_duration.FromNanoseconds(int(load_seconds * 1e9))
                release.avoided_prefill_duration.FromNanoseconds(int(avoided_seconds * 1e9))
            self.send(pb.Act(release=release), *self._reports())
        lookup.end()

    def commit(self, chunks: Sequence[pb.CommitChunk]) -> None:
        """Makes written chunks visible."""
        self.send(pb.Act(commit=pb.CommitChunks(chunks=chunks)))

    def drop_damaged(self, keys: Sequence[ChunkKey]) -> None:
        """Asks the node to drop chunks, at least one of which did not match its checksum."""
        self.send(pb.Act(drop_damaged=pb.DropDamagedChunks(chunk_keys=join_keys(keys))))

    def report_audit(
        self, outcome: pb.AuditOutcome.ValueType, chunk: pb.AuditedChunk, wrong_keys: Sequence[ChunkKey] = ()
    ) -> None:
        """Reports a compared chunk; `wrong_keys` name it, if it is wrong, and the chunks behind it."""
        self.send(
            pb.Act(
                audited=pb.AuditedChunks(chunk_count=1, wrong_keys=join_keys(wrong_keys), outcome=outcome, chunk=chunk)
            )
        )

    def send_reports(self) -> None:
        """Sends the reports of prompts that have ended, if there are any."""
        if self.attachment is not None and self.accounts.has_reports:
            self.send(*self._reports())

    def change_weights(self, version: str) -> None:
        """The engine has weights of this version from now on."""
        self.spec = replace(self.spec, weight_version=version)
        self.client.change_spec(self.spec)
        self.send(pb.Act(change_weights=pb.ChangeWeights(weight_version=version)))

    def serve(self, name: str, lora_identity: str) -> None:
        """Announces a LoRA adapter that is used for the first time, or that has other weights now."""
        if (model := self.client.served.use(name, lora_identity)) is not None:
            self.send(pb.Act(serve_models=pb.ServeModels(served_models=[model])))

    # ---- events

    def events(self, now: float) -> Iterator[SessionEvent[L]]:
        """Yields what the node has sent, in order. Lookups and credits are up to date when their event is yielded."""
        self.client.receive()
        inbox = self.client.inbox
        while inbox:
            event = inbox.popleft()
            if isinstance(event, pb.AttachResponse):
                for one in event.events:
                    if kind := one.WhichOneof("event"):  # others are of later versions
                        yield self._take(kind, getattr(one, kind), now)
            elif isinstance(event, Attachment):
                self._attach(event)
                yield SessionEvent(kind="attached", message=event)
            elif isinstance(event, Identified):
                self.spec = replace(self.spec, model_id=event.model_id)
                yield SessionEvent(kind="identified", message=event)
            elif isinstance(event, NodeLost):
                self.counters.add("node_losses")
                yield SessionEvent(kind="lost", message=self.lose())

    def _attach(self, attachment: Attachment) -> None:
        self.attachment = attachment
        if attachment.weight_version != self.spec.weight_version:  # the hello was sent before it changed
            self.send(pb.Act(change_weights=pb.ChangeWeights(weight_version=self.spec.weight_version)))
        if self.client.served.has_adapters:  # adapters may have been loaded since the hello was sent
            self.send(pb.Act(serve_models=pb.ServeModels(served_models=self.client.served.messages)))

    def lose(self) -> list[L]:
        """Ends everything that the node had granted; returns the lookups among it. The next node is not suspect."""
        self._suspicion.end()
        self.attachment = None
        self.credits = self._no_credits()
        lost = list(self._lookups.values())
        self._lookups.clear()
        for lookup in lost:
            lookup.account.node_lost()
            lookup.end()
        return lost

    def _take(self, kind: str, message: Any, now: float) -> SessionEvent[L]:
        if kind == "found":
            return self._found(message, now)
        if kind == "loaded":
            return SessionEvent(kind=kind, message=message, lookup=self._loaded(message))
        if kind == "granted":
            self._grant(message)
        elif kind == "welcome":
            self.welcome = message
            self.credits = self._no_credits(message.credit_limit)
        elif kind == "rejected_commit":
            logger.warning("the node refused chunk %s: %s", message.chunk_key.hex(), rpc.from_status(message.status))
        return SessionEvent(kind=kind, message=message)

    def _found(self, found: pb.FoundChunks, now: float) -> SessionEvent[L]:
        self._suspicion.end()
        lookup = self._lookups.get(found.lookup_id)
        if lookup is None or lookup.state is not LookupState.ASKED:
            self._lookups.pop(found.lookup_id, None)
            self.send(pb.Act(release=pb.ReleaseChunks(lookup_id=found.lookup_id)))
            return SessionEvent(kind="late", message=found, lookup=lookup)
        lookup.answer(found, now)
        if lookup.is_over:  # the node has released it, too
            del self._lookups[lookup.lookup_id]
        return SessionEvent(kind="found", message=found, lookup=lookup)

    def _loaded(self, loaded: pb.LoadedChunks) -> L | None:
        lookup = self._lookups.get(loaded.lookup_id)
        if lookup is None or lookup.state is not LookupState.LOADING:
            return None
        if loaded.first_chunk == len(lookup.chunks):
            lookup.chunks.extend(loaded.chunks)
        lookup.peer_id = loaded.peer_instance_id or lookup.peer_id
        if loaded.done:
            lookup.state = LookupState.FOUND
        return lookup

    def _grant(self, granted: pb.GrantedCredits) -> None:
        full = [(one.part, one.extent.offset) for one in granted.credits if not one.partial_token_count]
        partial = [
            (one.partial_token_count, one.part, one.extent.offset) for one in granted.credits if one.partial_token_count
        ]
        self.credits.settle(granted.settled_counts, full)
        self.credits.settle_partial(granted.settled_partial_token_counts, partial)

    def _no_credits(self, limit: int = 0) -> PartCredits:
        return PartCredits(len(self.spec.parts), limit, kept_when_idle=self._kept_when_idle)

    def _reports(self) -> list[pb.Act]:
        return [pb.Act(report=report) for report in self.accounts.take_reports()]


def _message(lookup: Lookup, reserve_counts: Sequence[int]) -> pb.LookupChunks:
    """The message of a lookup: the keys of its first `MAX_ASKED_KEYS` chunks, and those of its tokens that fit."""
    message = pb.LookupChunks(
        lookup_id=lookup.lookup_id,
        chunk_keys=join_keys(lookup.keys[:MAX_ASKED_KEYS]),
        part_reserve_counts=reserve_counts[1:],
        traceparent=lookup.span.traceparent,
        handoff_id=lookup.handoff_id,
        prefill_tokens_per_second=lookup.prefill_tokens_per_second,
    )
    if reserve_counts:
        message.reserve_count = reserve_counts[0]
    if lookup.worth_seconds:
        message.budget.FromNanoseconds(int(lookup.worth_seconds * 1e9))
    if lookup.tokens is not None:
        room = MAX_MESSAGE_BYTES - OTHER_BYTES - len(message.chunk_keys)
        message.tokens = lookup.tokens[: room // TOKEN_BYTES].tobytes()
        message.root_key = lookup.root
        message.chunk_extras.update(lookup.extras)
    return message
