"""What is counted, traced and reported of one prompt that an engine of the engine API has looked up."""

from __future__ import annotations

from lmkv import telemetry
from lmkv.misses import MissReason, reason_name
from lmkv.telemetry import NO_SPAN, Span, SpanKind
from lmkv.tiers import OWN, PEERS
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_client.engine.counters import EngineCounts
from lmkv_client.engine.prompts.hit_sources import HitSources
from lmkv_client.engine.prompts.prompt_account import PromptAccount, PromptAccounts


class PromptRecord:
    """A prompt from its lookup to the release of what was found. Not thread-safe.

    asked ──found──► found ──loading, loaded──► closed
      └──unanswered──► closed
    """

    def __init__(
        self,
        token_count: int,
        chunk_size: int,
        *,
        engine_request_id: str = "",
        traceparent: str | None = None,
        is_continued: bool = False,
    ) -> None:
        """`traceparent`: parent of the spans; None: the current span, if any.

        `is_continued`: the prompt was looked up before, so that only failures of the load are counted now.
        """
        self.engine_request_id = engine_request_id
        """In the report; empty until the lookup has an id."""
        self.account = PromptAccount(token_count, chunk_size)
        self.account.unanswered(MissReason.LOOKUP_TIMEOUT)
        self.is_closed = False
        self._chunk_size = chunk_size
        self._is_continued = is_continued
        self._sources = HitSources()
        self._hit_chunks = self._hit_tokens = 0
        """What can be loaded: the hit before its first damaged chunk."""
        self._loaded_chunks: int | None = None
        """Chunks that loads have brought, if one of them has ended early."""
        self._peer_id = ""
        self._lookup_span: Span = telemetry.begin(
            "lmkv.lookup", parent=traceparent, kind=SpanKind.CLIENT, asked_tokens=token_count
        )
        self._load_span: Span = NO_SPAN

    @property
    def lookup_traceparent(self) -> str:
        """Trace context for the node's spans of the lookup; empty if it is not traced."""
        return self._lookup_span.traceparent

    @property
    def load_traceparent(self) -> str:
        """The same for a load."""
        return self._load_span.traceparent

    @property
    def hit_tokens(self) -> int:
        """Tokens that can be loaded."""
        return self._hit_tokens

    def unanswered(self, reason: MissReason) -> None:
        """The lookup has no answer."""
        self.account.unanswered(reason)
        if reason is not MissReason.UNCACHEABLE:
            self._lookup_span.fail(reason.value, "the lookup has no answer")
        self._lookup_span.end()

    def found(self, found: pb.FoundChunks, hit_chunks: int) -> None:
        """The answer, of which the first `hit_chunks` can be loaded: others are behind a damaged one."""
        self._sources, self._peer_id = HitSources.of_answer(found), found.peer_instance_id
        tokens = min(self._sources.chunk_count * self._chunk_size, self.account.token_count)
        if found.partial_key:
            tokens = (self._sources.chunk_count - 1) * self._chunk_size + found.partial_token_count
        self.account.answered(tokens, found.missed)
        if hit_chunks < self._sources.chunk_count:
            self.account.unused = MissReason.DAMAGED
        self._hit_chunks = hit_chunks
        self._hit_tokens = tokens if hit_chunks == self._sources.chunk_count else hit_chunks * self._chunk_size
        by_tier = self._sources.tokens(0, tokens, self._chunk_size)
        self._lookup_span.set(**{f"{tier}_tokens": count for tier, count in by_tier.items()})
        self._lookup_span.set(peer_instance_id=self._peer_id)
        if found.missed:
            self._lookup_span.set(miss_reasons=[reason_name(span.reason) for span in found.missed])
        self._lookup_span.end()

    def loading(self, chunk_count: int) -> None:
        """A load of the first chunks begins, perhaps again."""
        if self._load_span is NO_SPAN and not self.is_closed:
            parent = self.lookup_traceparent
            self._load_span = telemetry.follow(
                "lmkv.load", parent, kind=SpanKind.CLIENT, asked_tokens=self.tokens_in(chunk_count)
            )

    def fell_short(self, chunk_count: int) -> None:
        """A load has ended with the first `chunk_count` chunks only."""
        self._loaded_chunks = max(chunk_count, self._loaded_chunks or 0)

    def delivered(self, chunk_count: int) -> None:
        """A load has brought the first `chunk_count` chunks, perhaps more than an earlier one that fell short."""
        if self._loaded_chunks is not None and chunk_count > self._loaded_chunks:
            self._loaded_chunks = chunk_count if chunk_count < self._hit_chunks else None

    def refuse(self, kept: int, reason: MissReason) -> None:
        """The hit behind its first `kept` chunks is computed, for that reason."""
        self.account.unused = reason
        self._loaded_chunks = kept

    def tier_behind(self, chunk_count: int) -> str:
        """The tier that had the chunk behind the first `chunk_count`."""
        return self._sources.tier_at(chunk_count * self._chunk_size, self._chunk_size)

    def tokens_in(self, chunk_count: int) -> int:
        """Tokens in the first chunks of the hit."""
        return self._hit_tokens if chunk_count >= self._hit_chunks else chunk_count * self._chunk_size

    def close(self, accounts: PromptAccounts, counts: EngineCounts) -> None:
        """Counts and reports the prompt, and ends its spans. What was found and not loaded counts as found."""
        if self.is_closed:
            return
        self.is_closed = True
        used = self._hit_tokens if self._loaded_chunks is None else self.tokens_in(self._loaded_chunks)
        by_tier = {tier: count for tier, count in self._sources.tokens(0, used, self._chunk_size).items() if count}
        self.account.take(0, by_tier)
        if self._loaded_chunks is not None:
            self._load_span.fail("incomplete", "fewer chunks arrived than were found")
        self._load_span.set(
            loaded_tokens=used,
            peer_instance_id=self._peer_id if by_tier.get(PEERS) else "",
            **{f"{tier}_tokens": count for tier, count in by_tier.items() if tier != OWN},
        )
        self._load_span.end()
        if self._is_continued:
            accounts.count(self.account)
            return
        for tier, count in by_tier.items():
            counts.add("tier_tokens", count, label=tier)
        accounts.close(self.engine_request_id, self.account)
