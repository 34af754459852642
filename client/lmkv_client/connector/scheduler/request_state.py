"""One request: the keys of its chunks, and its state by owner: its lookup, and what of it is stored."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, KeyChain, Tokens, as_tokens
from lmkv.spec import KvSpec
from lmkv.telemetry.spans import TRACEPARENT
from lmkv_client.connector.adapters import Adapter, Adapters
from lmkv_client.connector.messages import ExtentChecksum
from lmkv_client.connector.multimodal import MediaDigests
from lmkv_client.connector.scheduler.block_copies import items_of
from lmkv_client.connector.scheduler.handoff import HandoffParams
from lmkv_client.connector.vllm_api import Request, init_logger
from lmkv_client.engine.key_space import KeySpace
from lmkv_client.engine.prompt_account import Beginnings, PromptAccount
from lmkv_client.engine.session import Lookup, Session


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchChoice:
    """The number of tokens that are faster to load than to compute, of a hit and what vLLM has of it."""

    computed_count: int
    hit_tokens: int
    loaded_count: int


@dataclass(kw_only=True, slots=True)
class Audit:
    """Tokens of a hit that are computed although they could be loaded."""

    first: int
    """The first chunk that is computed."""
    token_count: int
    suspect: ChunkKey | None = None
    """The chunk that has differed once, if that is why the hit is audited."""
    name: str = ""
    """The name of the audit, if the request has asked for it."""
    is_over: bool = False
    """Whether a wrong chunk was found, so that those behind it say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """One part of a chunk in the pool that is computed again, and where it came from."""

    extent: ExtentChecksum
    """It is not held meanwhile: the checksum says whether its bytes are still there."""
    token_count: int
    """Tokens of the chunk."""
    tier: str
    """The tier that had it at the lookup."""
    peer_id: str
    """The peer of the lookup, if one had chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldEnd:
    """The chunk at the end of a hit that ends inside it: a partial chunk, or one with more tokens than the prompt."""

    key: ChunkKey
    index: int
    """The number of full chunks before it."""
    token_count: int
    """Tokens that it has in common with the prompt."""
    parts: Mapping[int, HeldPart]

    def is_computed(self, computed_count: int, chunk_size: int) -> bool:
        """Whether the first `computed_count` tokens of the prompt have all that are to be compared."""
        return computed_count >= self.index * chunk_size + self.token_count


@dataclass(kw_only=True, eq=False, slots=True)
class RequestLookup(Lookup):
    """The lookup of a request, and what the engine makes of its hit."""

    request: RequestState
    waited_seconds: float = 0.0
    """Time that the request has waited for the answer, and for a synchronous load of absent chunks."""
    loads_in_step: bool = False
    """Whether its load is part of the step that computes the rest of the prompt."""
    choice: FetchChoice | None = None
    """The part of the hit that is worth loading; None before it was chosen."""
    audit: Audit | None = None
    """How the hit is audited, if it is, until the engine computes the rest."""
    audit_is_chosen: bool = False
    """Whether the choice has been made that `audit` has."""

    def hit_count(self, *, pool_only: bool = False) -> int:
        """Chunks of the hit that can be loaded, or only of what is in the node's pool."""
        item_count = len(self.chunks) + (0 if pool_only else self.absent_count)
        return self.request.items.chunks_of(item_count, self.sources)

    def hit_tokens(self, chunk_count: int, request_tokens: int, *, sync: bool) -> int:
        """Tokens to offer to vLLM when `chunk_count` chunks of the hit can be loaded.

        In a step that needs the pages vLLM must compute at least one token: a synchronous load leaves one. It takes a
        hit that ends inside a block.
        """
        items = self.request.items
        return items.cut(self.tokens_in(chunk_count), request_tokens - 1 if sync else items.most_tokens(request_tokens))


class StoredTokens:
    """Counts what the workers have stored of one request. The log has one line of it, when the request is over."""

    def __init__(self) -> None:
        self._tokens_by_chunk: dict[int, int] = {}
        self.size_bytes = 0
        """Bytes of all chunks, also of shorter chunks that a longer chunk has superseded."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowChunks:
    """The chunks of a prompt whose windows are stored."""

    chunks: Sequence[int]
    """Ascending."""
    lasting: frozenset[int]
    """Chunks whose windows stay when later chunks of the prompt or its answer are stored: other prompts need them."""

    def between(self, start: int, stop: int) -> Sequence[int]:
        """The stored chunks from `start` up to, but not including, `stop`."""
        return self.chunks[bisect_left(self.chunks, start) : bisect_left(self.chunks, stop)]


@dataclass(kw_only=True, eq=False, slots=True)
class StoreProgress:
    """Tracks how much of a request is stored."""

    may_store: bool = True
    """Whether its chunks are to be stored."""
    stored_count: int = 0
    """Number of the first full chunks that need not be stored any more."""
    passed_count: int = 0
    """Number of the first full chunks whose pages vLLM may have freed, where it frees pages of running requests."""
    expected_ends: set[int] = field(default_factory=set)
    """Numbers of first full chunks behind which hits are expected although the prompt does not end there."""
    windows: dict[int, WindowChunks] = field(default_factory=dict)
    """The chunks of the prompt whose windows are stored, by part; computed when they are first asked for."""
    state_chunks: dict[int, int] = field(default_factory=dict)
    """The last chunk whose state is stored, by part."""
    partial_is_stored: bool
    """Whether the prompt's partial chunk, if there is one, needs no storing any more."""
    partials: dict[int, ChunkKey] = field(default_factory=dict)
    """The key of the longest partial chunk that is stored of the request's tokens, by the index of the chunk."""
    end_is_requested: bool = False
    """Whether a write credit for the prompt's partial chunk was requested."""
    tail_is_lost: bool = False
    """Whether the last tokens of the finished request were to be stored and were not."""
    skipped_chunks: set[int] = field(default_factory=set)
    """Indices of chunks of which a part was not stored and never will be."""
    failure_count: int = 0
    """Steps in which a store of the request has failed."""
    lacked_credit: bool = False
    """Whether a chunk was not stored in its step because there was no write credit."""
    lacking_count: int = 0
    """Decoded chunks that wait for write credits."""
    written: StoredTokens = field(default_factory=StoredTokens)
    audit: Audit | None = None
    """The audit of the request's hit, once the engine computes it."""
    held: dict[tuple[int, int], HeldPart] = field(default_factory=dict)
    """Chunks that are not to be stored but compared with those that the pool has, by part and index."""
    held_end: HeldEnd | None = None
    """The chunk at the end of the hit, if it is to be compared, too."""

    def expect_end(self, chunk_count: int) -> None:
        """Has the window before the end of the first `chunk_count` chunks stored."""
        if chunk_count and chunk_count not in self.expected_ends:
            self.expected_ends.add(chunk_count)
            self.windows.clear()


class RequestState:
    """Keys of one request, and its state."""

    __slots__ = (
        "account",
        "adapter",
        "all_tokens",
        "audit_name",
        "chain",
        "computed_count",
        "extras",
        "fingerprint",
        "handoff_id",
        "has_tails",
        "is_handed_off",
        "items",
        "keys",
        "load_failed",
        "load_timeout",
        "lookup",
        "media_names",
        "partial_key",
        "preemption_count",
        "request_id",
        "store",
        "token_count",
        "tokens",
        "traceparent",
    )

    def __init__(
        self,
        spec: KvSpec,
        request_id: str,
        chain: KeyChain,
        tokens: Tokens,
        all_tokens: Sequence[int],
        *,
        partial: bool,
    ) -> None:
        """`tokens` are the prompt's; of a handoff only those that it covers (`covered_by`). `partial`: whether the
        tokens behind its last full chunk make a chunk, too."""
        chain.extend(tokens)
        self.all_tokens = all_tokens
        """Prompt and output, a view that grows with the request."""
        self.request_id = request_id
        self.tokens = tokens
        """The prompt's."""
        self.token_count = tokens.size
        """Tokens of the prompt."""
        self.account = PromptAccount(self.token_count, chain.chunk_size)
        self.chain = chain
        self.partial_key: ChunkKey | None = chain.partial(tokens) if partial and spec.ends_anywhere else None
        self.keys: list[ChunkKey] = [*chain.keys, self.partial_key] if self.partial_key else list(chain.keys)
        """Keys of the prompt's chunks; the keys of decoded chunks are only in `chain`."""
        self.traceparent = ""
        """W3C `traceparent` of the request's spans; empty if it is not traced."""
        self.handoff_id = ""
        """The handoff that brings the prompt, if one does."""
        self.audit_name = ""
        """The name of the audit that the request asks for, if it does."""
        self.is_handed_off = False
        """Whether a handoff sends the prompt to a decode engine."""
        self.load_timeout = 1.0
        """Longest wait for a load, in seconds."""
        self.has_tails = partial and spec.ends_anywhere
        """Whether a hit may end inside a chunk."""
        self.items = items_of(spec)
        """The kind of items that its hits have."""
        self.extras: Mapping[int, bytes] = {}
        """Inputs of the chunks' keys other than tokens, by index of the chunk."""
        self.media_names: frozenset[str] = frozenset()
        """vLLM's names of the items in the prompt."""
        self.fingerprint = spec.fingerprint
        """Fingerprint of the KV spec from which the keys of this request are made."""
        self.adapter: Adapter | None = None
        """The LoRA adapter in its keys, if it has one."""
        self.lookup = RequestLookup(account=self.account, request=self)
        """The latest lookup."""
        self.store = StoreProgress(partial_is_stored=self.partial_key is None)
        self.computed_count = 0
        """Tokens that vLLM had itself when it last asked."""
        self.preemption_count = 0
        """Number of the request's preemptions when it was last looked up."""
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
        return max(0, self.full_count - self.store.stored_count) * self.store.may_store

    @property
    def asked_keys(self) -> list[ChunkKey]:
        """The keys to look up. A hit of the request can have no other chunks."""
        count = self.asked_tokens.size
        return self.keys if count == self.token_count else self.keys[: count // self.chunk_size]

    @property
    def asked_tokens(self) -> Tokens:
        """The tokens of the prompt that a hit of the request can have."""
        return self.tokens[: self.items.most_tokens(len(self.all_tokens))]

    def mark_loaded(self, chunk_count: int) -> None:
        """Marks the prompt's first `chunk_count` chunks as held by the node and not computed here: vLLM has not all of
        their pages."""
        self.mark_held(chunk_count)
        if self.lookup.partial:  # of the chunk that begins with it vLLM has all pages that hits behind it read
            chunk_count = min(chunk_count, self.lookup.partial.index)
        self.store.passed_count = max(self.store.passed_count, min(chunk_count, self.full_count))

    def mark_held(self, chunk_count: int) -> None:
        """Marks the first `chunk_count` chunks of the hit as held by the node: they need not be stored."""
        found, store = self.lookup.partial, self.store
        if found and chunk_count > found.index:
            chunk_count = found.index
            if self.key_behind(found.index, found.token_count) == found.key:
                store.partials[found.index] = found.key  # else it has more tokens
            rest_count = self.token_count - self.full_count * self.chunk_size
            store.partial_is_stored |= found.index == self.full_count and found.token_count >= rest_count
        store.stored_count = max(store.stored_count, min(chunk_count, self.full_count))
        if self.partial_key and chunk_count == len(self.keys):
            store.partial_is_stored = True
            store.partials[self.full_count] = self.partial_key

    def tokens_in(self, chunk_count: int) -> int:
        """Tokens in the prompt's first `chunk_count` chunks."""
        return min(chunk_count * self.chunk_size, self.token_count)

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


logger = init_logger("vllm.lmkv")


class RequestBuilder:
    """Makes request states; announces LoRA adapters to the node with their first request."""

    def __init__(self, config: ConnectorConfig, session: Session[RequestLookup], adapters: Adapters) -> None:
        self._config = config
        self._session = session
        self._adapters = adapters
        self._beginnings = Beginnings()
        self.media = MediaDigests()

    def build(self, request: Request, handoff: HandoffParams | None) -> RequestState | None:
        """The state of a new request; None if it cannot be cached."""
        try:  # items are noted in any case: what vLLM computes of them may be used for requests that can be cached
            extras = self.media.extras(request.mm_features, self._session.spec.chunk_size)
            if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
                return None
            adapter = None
            if request.lora_request and (adapter := self._adapters.of_request(request.lora_request)) is None:
                return None
            return self._build(request, handoff, adapter, extras)
        except (LmkvError, OSError, ValueError) as error:
            logger.warning("[%s] not cached: %s", request.request_id, error)
            return None

    def _build(
        self, request: Request, handoff: HandoffParams | None, adapter: Adapter | None, extras: Mapping[int, bytes]
    ) -> RequestState:
        config, spec = self._config, self._session.spec
        lora = adapter.identity if adapter else ""
        chain = KeySpace(spec, config.cluster_secret).chain(salt=request.cache_salt or "", lora=lora, extras=extras)
        if adapter:
            self._session.serve(adapter.name, adapter.identity)
        tokens = as_tokens(request.prompt_token_ids)
        state = RequestState(
            spec,
            request.request_id,
            chain,
            tokens[: covered_count(handoff, spec, tokens.size)],
            request.all_token_ids,
            partial=config.stores_partial_chunks,
        )
        state.traceparent = (request.trace_headers or {}).get(TRACEPARENT, "")
        is_received = handoff is not None and bool(handoff.prompt_token_count)
        state.handoff_id = handoff.handoff_id if handoff and is_received else ""
        state.is_handed_off = handoff is not None and handoff.is_prefill
        state.load_timeout = config.pd_load_timeout if is_received else config.load_timeout
        state.store.may_store = config.stores_chunks or (handoff is not None and handoff.prompt_token_count != 0)
        state.extras = extras
        state.media_names = frozenset(feature.identifier for feature in request.mm_features)
        state.adapter = adapter
        first = tokens[: spec.chunk_size]
        state.account.seen_elsewhere = self._beginnings.note(
            request.cache_salt or "", first, extras.get(0, b""), chain.root
        )
        return state


def covered_count(handoff: HandoffParams | None, spec: KvSpec, token_count: int) -> int:
    """The number of a request's first tokens that its handoff covers; without a handoff all of them.

    It covers the longest hit of a request with the tokens of the prefill's prompt: a decode engine that repeats the
    first token has no more.
    """
    if handoff is None or handoff.prompt_token_count == 0:
        return token_count
    count = token_count if handoff.is_prefill else min(handoff.prompt_token_count or 0, token_count)
    return items_of(spec).most_tokens(count)
