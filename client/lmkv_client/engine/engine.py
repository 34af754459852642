"""`Engine`: one engine's attachment to its node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from lmkv import config as configuration
from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigError
from lmkv.keys import ChunkKey, Tokens, as_tokens
from lmkv.spec import KvSpec
from lmkv_client.engine.caller_lookup import CallerLookup, await_result
from lmkv_client.engine.counters import EngineCounters
from lmkv_client.engine.dispatcher import Dispatcher
from lmkv_client.engine.extent import Copier, Extent, Written
from lmkv_client.engine.held import Held
from lmkv_client.engine.key_space import KeySpace, ServedNames
from lmkv_client.engine.prompt_account import PromptAccount
from lmkv_client.engine.reservations import ExtentRequest
from lmkv_client.engine.session import MAX_ASKED_KEYS
from lmkv_kernels import Pages


class LookupOptions(TypedDict, total=False):
    """Properties of a prompt besides its keys, for `Engine.lookup` and `Engine.begin_lookup`."""

    tokens: Sequence[int] | NDArray[np.integer] | None
    """The prompt's, of shape `[n]`, from which the keys were computed with this `salt` and `lora`. With them a hit may
    end inside a chunk, at the last token that another prompt has in common with this one: at `Held.token_count`. The
    last extent may have more tokens, which are not of this prompt. Without them, or if `save_partial_chunks` is off, it
    ends with one of the keys."""
    salt: str
    lora: str
    engine_request_id: str
    """Names the prompt in the node's reports (`lmkv explain`); empty: a number is made."""
    traceparent: str | None
    """Parent of the spans; None: the current span, if any."""
    timeout: float | None
    """None: `lookup_timeout` of the configuration, or longer, up to `max_lookup_timeout`, if by the times of
    `Engine.prefilled` more than twice as long may be saved."""


class Engine:
    """One engine's attachment to the node on its host. Made by `attach`; a context manager.

    All methods may be called on any thread, and several at once. Whatever happens to the node, they do not raise:
    without a node nothing is found, no extents are granted and nothing is stored, until one is available again.
    `counters` shows it. Times are in seconds.
    """

    def __init__(self, spec: KvSpec, config: ConnectorConfig, dispatcher: Dispatcher) -> None:
        """Use `attach`."""
        self.spec = spec
        """The format of the engine's chunks, as it has attached."""
        self.config = config
        """The configuration in use."""
        self._dispatcher = dispatcher
        self._key_space = KeySpace(spec, config.cluster_secret)

    @classmethod
    def attach(
        cls,
        spec: KvSpec,
        *,
        config: ConnectorConfig | Mapping[str, Any] | None = None,
        rank: int = 0,
        rank_count: int = 1,
        names: Iterable[str] = (),
    ) -> Self:
        """Finds the node, or starts one, and attaches. Waits for it up to `node_start_timeout` (20 s).

        `config` has the keys of vLLM's connector (docs/reference/configuration.md), such as `node_address`,
        `max_local_cpu_size` or `cluster_secret`; they override `LMKV_...` in the environment and the file that
        `LMKV_CONFIG_FILE` names. A `ConnectorConfig` is taken as it is.

        With a `rank_count` above 1 each tensor-parallel rank attaches by itself, with a spec of what it alone keeps:
        `kv_head_count` is the number of its heads. `Engine.spec` then names rank and rank count, so that keys of ranks
        differ. Where all ranks keep the same (MLA), attach with a `rank_count` of 1 and let one rank store.

        `names` are names under which the engine serves the model, besides `spec.model_name`.

        Raises `ConfigError` if the configuration is wrong or the node cannot start with it, if `rank` is not below
        `rank_count`, or if the spec's chunks have several parts (models with several kinds of layers).
        """
        if not spec.matches_prefixes:
            raise ConfigError("Engine.attach: the spec must be of chunks of one part, all of full attention")
        if not 0 <= rank < rank_count:
            raise ConfigError(f"Engine.attach: rank {rank} is not among {rank_count} ranks")
        if not isinstance(config, ConnectorConfig):
            config = configuration.load(ConnectorConfig, flags=dict(config or {}), flags_place="Engine.attach")
        own = spec_of_rank(spec, rank, rank_count)
        telemetry.trace_engine(config.instance_id, engine_traces=False)
        dispatcher = Dispatcher(config, own, ServedNames(names))
        dispatcher.start()
        return cls(own, config, dispatcher)

    @property
    def is_attached(self) -> bool:
        """Whether a node is attached now."""
        return self._dispatcher.is_attached

    @property
    def counters(self) -> EngineCounters:
        """Returns a snapshot of the counts since `attach`."""
        return self._dispatcher.counters

    def keys(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        *,
        salt: str = "",
        lora: str = "",
        partial: bool = False,
    ) -> list[ChunkKey]:
        """Keys, 16 bytes each, of the full chunks of a prompt; if `partial`, also of the tokens after them.

        `tokens`: ids, of shape `[n]`. `salt` separates tenants, `lora` is the identity of a LoRA adapter,
        `name@digest`. With the hash scheme `sha256-pages` they are those of `foreign_keys` with SGLang's digests of
        these tokens, of full pages only. Raises `BadTokens` if an id is negative or beyond the spec's vocabulary.
        """
        return self._key_space.of_tokens(tokens, salt=salt, lora=lora, partial=partial)

    def foreign_keys(self, digests: Sequence[bytes | str], *, salt: str = "") -> list[ChunkKey]:
        """Returns the key of each page that the engine names by a digest: for engines that do not show tokens.

        A digest, 32 bytes or 64 hexadecimal digits, must stand for all tokens of the page and before it. A page is a
        chunk: its tokens are the spec's `chunk_size`. Model, element type, layout and rank are added by the spec.
        Raises `BadChunkKey` if a digest is malformed.
        """
        return self._key_space.of_digests(digests, salt=salt)

    def root(self, *, salt: str = "", lora: str = "") -> ChunkKey:
        """Returns the key that a prompt's first chunk follows: the `Written.parent` of one that is not full, and the
        `Written.owner` of all."""
        return self._key_space.root(salt, lora)

    def lookup(self, keys: Sequence[ChunkKey], *, is_continued: bool = False, **options: Unpack[LookupOptions]) -> Held:
        """Finds the longest prefix of `keys` that can be loaded from pool, disk, peers or the remote store.

        Blocks until the node has answered, or the timeout. Empty if the node does not answer in time. The result must
        be released: then the prompt is counted and reported. `is_continued`: the prompt was looked up before, and of
        this lookup only what it fails to bring is counted. Raises `BadTokens` as `keys` does.
        """
        lookup = self._asked(keys, options)
        lookup.is_continued = is_continued
        self._dispatcher.lookup(lookup)
        return Held(self._dispatcher, await_result(lookup.future, lookup.deadline, self._dispatcher.expire))

    def begin_lookup(
        self, keys: Sequence[ChunkKey], *, is_counted: bool = True, **options: Unpack[LookupOptions]
    ) -> Future[Held]:
        """As `lookup`, without blocking. A future that is cancelled releases what it would have held.

        `is_counted`: whether it is counted and reported as a prompt.
        """
        result: Future[Held] = Future()

        def found(answer: Future[CallerLookup | None]) -> None:
            held = Held(self._dispatcher, answer.result())
            if result.set_running_or_notify_cancel():
                result.set_result(held)
            else:
                held.release()

        lookup = self._asked(keys, options)
        lookup.is_counted = is_counted
        self._dispatcher.lookup(lookup)
        lookup.future.add_done_callback(found)
        return result

    def prefilled(self, token_count: int, seconds: float) -> None:
        """Records how long the engine has taken to compute tokens of a prompt: lookups take as long as that is worth.

        Fewer tokens than a chunk has are ignored.
        """
        self._dispatcher.prefilled(token_count, seconds)

    def missing(self, keys: Sequence[ChunkKey], *, timeout: float = 0.1) -> list[ChunkKey]:
        """The keys that are left to be stored: those behind the prefix of `keys` that the node's pool holds.

        Blocks for at most `timeout`; all keys if the node does not answer in time.
        """
        lookup = self._asked(keys, {"timeout": timeout})
        lookup.is_counted = False
        self._dispatcher.lookup(lookup)
        found = await_result(lookup.future, lookup.deadline, self._dispatcher.expire)
        with Held(self._dispatcher, found) as held:
            return list(keys[held.own_count :])

    def reserve(self, count: int, *, timeout: float = 0.1) -> list[Extent]:
        """Extents to write into, of one full chunk each: at most `count`, or fewer if the node has no more.

        Waits for at most `timeout`: for the node's answer and, while other threads have all that an engine may have
        (256 extents, or a third of the pool if that is less), for an extent that they commit or put back. With 0 it
        returns those that were granted before, and requests the others for later calls. Each extent must be committed
        or put back.
        """
        reservation = self._reservation(count, timeout)
        return await_result(reservation.future, reservation.deadline, self._dispatcher.expire)

    def begin_reserve(self, count: int, *, timeout: float = 0.1) -> Future[list[Extent]]:
        """As `reserve`, without blocking. A future that is cancelled puts back what it would have got."""
        return self._reservation(count, timeout).future

    def commit(self, written: Iterable[Written]) -> None:
        """Makes written chunks visible, to all later lookups of this engine, and soon to others. Never blocks.

        Chunks in extents of a node that is lost are dropped and counted. Raises `ValueError`, before any chunk is
        committed, if an extent is not reserved any more, or a `token_count` is not from 1 to `chunk_size`.
        """
        self._dispatcher.commit(list(written))

    def put_back(self, extents: Iterable[Extent]) -> None:
        """Returns reserved extents that are not committed. Others are ignored. Never blocks."""
        self._dispatcher.put_back(list(extents))

    def register(self, pages: Pages | Sequence[Pages], *, threads: int | None = None) -> Copier:
        """A copier for the engine's pages in host memory.

        Several pages have a share of each chunk: some of its layers or heads, keys or values
        (`lmkv_kernels.separate_rows`). `threads`: those of one copy; 0: automatic, None: as configured by
        `copy_threads`. Raises `ValueError` if the pages are not in host memory, or are not what the spec says.
        """
        every = [pages] if isinstance(pages, Pages) else list(pages)
        return Copier(self.spec, every, self.config.copy_threads if threads is None else threads)

    def close(self) -> None:
        """Detaches. All calls end, and later calls return nothing; extents can still be read. Idempotent.

        A node that `attach` started stays for `node_linger`: the engine may restart.
        """
        self._dispatcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, keys: Sequence[ChunkKey], options: LookupOptions) -> CallerLookup:
        """A lookup of these keys, to be begun."""
        if unknown := options.keys() - LookupOptions.__optional_keys__:
            raise TypeError(f"Engine.lookup: unexpected argument {min(unknown)}")
        size, tokens, timeout = self.spec.chunk_size, options.get("tokens"), options.get("timeout")
        token_count = len(keys) * size if tokens is None else len(tokens)
        shown = self._shown(tokens)
        worth = 0.0
        if timeout is None:
            worth = self._dispatcher.worth_of(token_count)
            timeout = max(self.config.lookup_timeout, worth)
        return CallerLookup(
            keys=keys[:MAX_ASKED_KEYS],
            account=PromptAccount(token_count, size),
            deadline=time.monotonic() + timeout,
            worth_seconds=worth,
            tokens=shown,
            root=b"" if shown is None else self.root(salt=options.get("salt", ""), lora=options.get("lora", "")),
            engine_request_id=options.get("engine_request_id", ""),
            traceparent=options.get("traceparent"),
        )

    def _shown(self, tokens: Sequence[int] | NDArray[np.integer] | None) -> Tokens | None:
        """The tokens that the node is to look at; None if no partial chunk can be found by them."""
        if tokens is None or self.spec.has_page_hashes or not self.config.stores_partial_chunks:
            return None
        return as_tokens(tokens, self.spec.vocab_size)

    def _reservation(self, count: int, timeout: float) -> ExtentRequest:
        reservation = ExtentRequest(count=max(0, count), deadline=time.monotonic() + timeout)
        self._dispatcher.reserve(reservation)
        return reservation


def spec_of_rank(spec: KvSpec, rank: int, rank_count: int) -> KvSpec:
    """The spec of what one rank alone keeps: with several ranks its `model_id` names the rank."""
    if rank_count == 1:
        return spec
    return replace(spec, model_id=f"{spec.model_id} (rank {rank} of {rank_count})")
