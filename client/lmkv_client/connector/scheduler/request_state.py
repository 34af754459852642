"""One request: the keys of its chunks, the state of its lookup, and how much of it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lmkv.keys import ChunkKey, KeyChain, Tokens, as_tokens
from lmkv.telemetry import NO_SPAN, Span
from lmkv.v1.engine_service_pb2 import HeldChunk
from lmkv_client.connector.adapters import Adapter
from lmkv_client.engine.prompts.hit_sources import HitSources
from lmkv_client.engine.prompts.prompt_account import PromptAccount

NO_EXTRAS: Mapping[int, bytes] = {}


class LookupState(Enum):
    """The state of a request's lookup.

    ASKED ──answer──► FOUND ──synchronous load of absent chunks──► FETCHING ──► FOUND
      └──timeout, node lost──► OVER ◄──nothing found, load failed, loaded──┘
    """

    ASKED = auto()
    """The node has not answered yet."""
    FOUND = auto()
    """The node holds `own` for the request; `absent_count` more can be brought in."""
    FETCHING = auto()
    """Chunks are on their way into the pool, and the request waits for them."""
    OVER = auto()
    """The node holds nothing for the request, and no answer is expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialChunk:
    """A stored chunk that is not full: tokens behind the full chunks before it."""

    key: ChunkKey
    index: int
    """The number of full chunks before it."""
    token_count: int


class StoredTokens:
    """Counts what the workers have stored of one request. The log has one line of it, when the request is over."""

    def __init__(self) -> None:
        self._tokens_by_chunk: dict[int, int] = {}
        self.size_bytes = 0
        """Bytes of all chunks, shorter ones that a longer one has superseded included."""
        self.seconds = 0.0
        self.is_all_planned = False
        """Whether the request has finished, so that no other chunk of it will be written."""

    def add_chunk(self, index: int, token_count: int) -> None:
        """Adds a full or a partial chunk."""
        self._tokens_by_chunk[index] = max(token_count, self._tokens_by_chunk.get(index, 0))

    @property
    def token_count(self) -> int:
        """Tokens of the request that can be loaded now. Those of superseded chunks count once."""
        return sum(self._tokens_by_chunk.values())


class RequestState:
    """Keys, search and store progress of one request."""

    __slots__ = (
        "absent_count",
        "account",
        "adapter",
        "all_tokens",
        "chain",
        "chosen_tokens",
        "computed_count",
        "end_is_requested",
        "extras",
        "fingerprint",
        "found_at",
        "found_partial",
        "handoff_id",
        "has_parts",
        "hit_chunk_count",
        "is_handed",
        "keys",
        "lacked_credit",
        "lacking_count",
        "load_failed",
        "load_timeout",
        "loads_in_step",
        "looked_up_at",
        "lookup_id",
        "lookup_span",
        "lookup_state",
        "may_store",
        "own",
        "partial_is_stored",
        "partial_key",
        "partials",
        "passed_count",
        "peer_id",
        "preemption_count",
        "request_id",
        "skipped_chunks",
        "sources",
        "state_chunks",
        "store_failures",
        "stored",
        "stored_count",
        "tail_is_lost",
        "token_count",
        "tokens",
        "traceparent",
        "waited_seconds",
    )

    def __init__(
        self,
        request_id: str,
        tokens: Tokens,
        all_tokens: Sequence[int],
        chain: KeyChain,
        *,
        partial: bool,
        traceparent: str = "",
        handoff_id: str = "",
        load_timeout: float = 1.0,
        may_store: bool = True,
        has_parts: bool = False,
        extras: Mapping[int, bytes] = NO_EXTRAS,
        fingerprint: bytes = b"",
        adapter: Adapter | None = None,
    ) -> None:
        """`tokens` are the prompt's; of a handoff only those that it covers. `extras` are those of `chain`.

        `has_parts`: a hit has items, so that it is all or nothing, and never the whole request.
        """
        chain.extend(tokens)
        self.all_tokens = all_tokens
        """Prompt and output, a view that grows with the request."""
        self.request_id = request_id
        self.tokens = tokens
        """The prompt's."""
        self.token_count = tokens.size
        """Tokens of the prompt."""
        self.account = PromptAccount(self.token_count, chain.chunk_size)
        """Where its prompt comes from."""
        self.chain = chain
        self.partial_key: ChunkKey | None = chain.partial(tokens) if partial else None
        self.keys: list[ChunkKey] = [*chain.keys, self.partial_key] if self.partial_key else list(chain.keys)
        """Keys of the prompt's chunks; decoded ones are only in `chain`."""
        self.traceparent = traceparent
        """W3C `traceparent` of the request's spans; empty if it is not traced."""
        self.lookup_span: Span = NO_SPAN
        """The span of the running lookup."""
        self.handoff_id = handoff_id
        """The handoff that brings the prompt, if one does."""
        self.is_handed = False
        """Whether a handoff sends its prompt to a decode engine."""
        self.load_timeout = load_timeout
        """Longest wait for a load, in seconds."""
        self.may_store = may_store
        """Whether its chunks are to be stored."""
        self.has_parts = has_parts
        self.extras = extras
        """Inputs of the chunks' keys other than tokens, by index of the chunk."""
        self.fingerprint = fingerprint
        """Fingerprint of the KV spec from which the keys of this request are made."""
        self.adapter = adapter
        """The LoRA adapter in its keys, if it has one."""
        self.lookup_state = LookupState.OVER
        self.lookup_id = ""
        """Id of the lookup at the node; empty if there is none."""
        self.looked_up_at = 0.0
        self.found_at = 0.0
        self.waited_seconds = 0.0
        """Time that the request has waited for its lookup, and for a synchronous load of absent chunks."""
        self.own: list[HeldChunk] = []
        """The first chunks of the prompt, or of the first items of the hit, that the node holds for it."""
        self.absent_count = 0
        """Chunks, or items, behind these that can be brought in."""
        self.hit_chunk_count = 0
        """Chunks of the hit that the lookup found."""
        self.sources = HitSources()
        """Where the chunks of the last answer were."""
        self.peer_id = ""
        self.computed_count = 0
        """Tokens that vLLM had itself when it last asked."""
        self.loads_in_step = False
        """Whether its load is part of the step that computes the rest of the prompt."""
        self.preemption_count = 0
        """Number of the request's preemptions when it was last looked up."""
        self.stored = StoredTokens()
        self.stored_count = 0
        """Number of the first full chunks that need not be stored any more."""
        self.passed_count = 0
        """Number of the first full chunks whose pages vLLM may have freed, where it frees pages of running requests."""
        self.state_chunks: dict[int, int] = {}
        """The last chunk whose state is stored, by part."""
        self.partial_is_stored = self.partial_key is None
        """Whether the prompt's partial chunk, if there is one, needs no storing any more."""
        self.end_is_requested = False
        """Whether a write credit for it was requested."""
        self.tail_is_lost = False
        """Whether the last tokens of the finished request were to be stored and were not."""
        self.found_partial: PartialChunk | None = None
        """The partial chunk at the end of the last hit, unless it is the prompt's own."""
        self.partials: dict[int, ChunkKey] = {}
        """The key of the longest partial chunk that is stored of the request's tokens, by the index of the chunk."""
        self.chosen_tokens: tuple[int, int, int] | None = None
        """What was chosen of the last hit: tokens that vLLM had, those of the hit, and those of them to load."""
        self.skipped_chunks: set[int] = set()
        """Indices of chunks of which a part was not stored and never will be."""
        self.store_failures = 0
        self.lacked_credit = False
        """Whether a chunk was not stored in its step because there was no write credit."""
        self.lacking_count = 0
        """Decoded chunks that wait for write credits."""
        self.load_failed = False
        """Whether a load has failed: the same is not offered to vLLM again."""

    @property
    def chunk_size(self) -> int:
        """Tokens per full chunk."""
        return self.chain.chunk_size

    @property
    def full_count(self) -> int:
        """Full chunks of the prompt."""
        return self.token_count // self.chunk_size

    @property
    def ends_with_a_chunk(self) -> bool:
        """Whether the prompt's last chunk is full."""
        return self.token_count == self.full_count * self.chunk_size

    @property
    def unstored_count(self) -> int:
        """Full chunks of the prompt that may still need storing."""
        return max(0, self.full_count - self.stored_count) * self.may_store

    @property
    def asked_keys(self) -> list[ChunkKey]:
        """The keys to look up. With parts a hit leaves a token to compute: a state cannot be cut back."""
        if not self.has_parts:
            return self.keys
        return self.handed_keys if self.handoff_id else self.keys[: (len(self.all_tokens) - 1) // self.chunk_size]

    @property
    def handed_keys(self) -> list[ChunkKey]:
        """The keys of what a prefill hands off. With parts it ends before the prompt does: there vLLM keeps states."""
        return self.keys[: (self.token_count - 1) // self.chunk_size] if self.has_parts else self.keys

    @property
    def hit_keys(self) -> list[ChunkKey]:
        """The keys of the chunks of the hit, and of those behind it unless it ends with a partial chunk."""
        found = self.found_partial
        return [*self.keys[: found.index], found.key] if found else self.keys

    def found_chunks(self, *, pool_only: bool = False) -> int:
        """Chunks of the hit that the lookup found, or only of what is in the node's pool."""
        if self.has_parts:
            return 0 if pool_only and self.absent_count else self.hit_chunk_count
        return len(self.own) + (0 if pool_only else self.absent_count)

    def mark_loaded(self, chunk_count: int) -> None:
        """Marks the prompt's first `chunk_count` chunks as held by the node and not computed here: vLLM has not all of
        their pages."""
        self.mark_held(chunk_count)
        self.passed_count = max(self.passed_count, min(chunk_count, self.full_count))

    def mark_held(self, chunk_count: int) -> None:
        """Marks the first `chunk_count` chunks of the hit as held by the node: they need not be stored."""
        found = self.found_partial
        if found and chunk_count > found.index:
            chunk_count = found.index
            if self.key_behind(found.index, found.token_count) == found.key:
                self.partials[found.index] = found.key  # else it has more tokens
            rest_count = self.token_count - self.full_count * self.chunk_size
            self.partial_is_stored |= found.index == self.full_count and found.token_count >= rest_count
        self.stored_count = max(self.stored_count, min(chunk_count, self.full_count))
        if self.partial_key and chunk_count == len(self.keys):
            self.mark_partial(self.partial_key)

    def mark_partial(self, key: ChunkKey) -> None:
        """Marks the prompt's partial chunk as stored under its key."""
        self.partial_is_stored = True
        self.partials[self.full_count] = key

    def tokens_in(self, chunk_count: int) -> int:
        """Tokens in the prompt's first `chunk_count` chunks."""
        return min(chunk_count * self.chunk_size, self.token_count)

    def found_tokens(self, chunk_count: int) -> int:
        """Tokens in the first `chunk_count` chunks of the hit."""
        found = self.found_partial
        if found and chunk_count > found.index:
            return found.index * self.chunk_size + found.token_count
        return self.tokens_in(chunk_count)

    def hit_tokens(self, chunk_count: int, request_tokens: int, *, sync: bool) -> int:
        """Tokens to offer to vLLM when `chunk_count` chunks of the hit can be loaded.

        In a step that needs the pages vLLM must compute at least one token: a synchronous load leaves one. It takes a
        hit that ends inside a block.
        """
        hit = self.found_tokens(chunk_count)
        if self.has_parts:
            return hit if hit < request_tokens else 0
        return min(hit, request_tokens - 1 if sync else request_tokens)

    def set_found(
        self,
        own: Sequence[HeldChunk],
        sources: HitSources,
        peer_id: str,
        now: float,
        partial: PartialChunk | None = None,
    ) -> None:
        """Records the answer of the node; a lookup that found nothing is over."""
        self.found_partial = partial
        self.chosen_tokens = None
        self.own = list(own)
        self.hit_chunk_count = sources.chunk_count
        self.sources = sources
        self.absent_count = sources.absent_count
        self.peer_id = peer_id
        self.found_at = now
        self.lookup_state = LookupState.FOUND
        self.mark_held(self.found_chunks(pool_only=True))
        self.end_lookup_span(sources)
        if not own and not self.absent_count:
            self.end_lookup()

    def keys_up_to(self, chunk_count: int) -> int:
        """Computes missing keys of decoded chunks; returns how many of the first `chunk_count` chunks have a key."""
        if chunk_count > len(self.chain.keys):
            self.chain.extend(as_tokens(self.all_tokens[: chunk_count * self.chunk_size]))
        return min(chunk_count, len(self.chain.keys))

    def key_behind(self, index: int, token_count: int) -> ChunkKey:
        """Key of the chunk of `token_count` tokens, prompt or output, behind the first `index` full chunks."""
        start = index * self.chunk_size
        return self.chain.behind(index, as_tokens(self.all_tokens[start : start + token_count]))

    def prefix_digests(self, index: int, token_count: int) -> bytes:
        """Prefix digests of the chunk of `token_count` tokens, prompt or output, behind the first `index` chunks."""
        start = index * self.chunk_size
        return self.chain.prefixes(index, as_tokens(self.all_tokens[start : start + token_count]))

    def end_lookup_span(self, sources: HitSources) -> None:
        """Ends the span of the lookup with what was found."""
        found = self.found_partial
        end = self.found_tokens(found.index + 1) if found else self.token_count
        tokens = sources.tokens(0, end, self.chunk_size)
        self.lookup_span.set(**{f"{tier}_tokens": count for tier, count in tokens.items()})
        self.lookup_span.set(peer_instance_id=self.peer_id)
        self.lookup_span.end()
        self.lookup_span = NO_SPAN

    def end_lookup(self) -> None:
        """Ends the lookup: the node holds nothing for the request any more."""
        if self.lookup_state is LookupState.ASKED:
            self.lookup_span.fail("unanswered", "the request or the node was gone before the answer came")
            self.end_lookup_span(HitSources())
        self.lookup_state = LookupState.OVER
        self.lookup_id = ""
        self.own = []
        self.absent_count = self.hit_chunk_count = 0
