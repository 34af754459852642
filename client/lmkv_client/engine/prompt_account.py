"""Accounts for the tokens of each prompt: where they came from, why others were computed, what clients see of that."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey, Tokens
from lmkv.misses import MissReason, describe, reason_from_proto, reason_name, reason_to_proto
from lmkv.rpc import from_status
from lmkv.tiers import PEERS
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import MISS_REASON_OTHER_SALT, PromptSpan, RequestReport
from lmkv_client.engine.counters import Counters
from lmkv_client.engine.log import logger

ENGINE = "engine"
"""The tier of tokens that the engine's own prefix cache had."""
MAX_REPORTS = 256
"""Reports in one message to the node; further reports of the same step are dropped."""
MAX_ID_LENGTH = 128
"""Characters of a request's id in its report: clients choose ids."""


class PromptAccount:
    """Accounts for one request: what its lookup has found, what was used of that, and why no more was.

    asked ──answered, unanswered──► taken (fixed: what a preempted request computes again is no miss)
    """

    __slots__ = (
        "_computed_count",
        "_hit_tokens",
        "_missed",
        "_unanswered",
        "chunk_size",
        "create_time",
        "is_taken",
        "loaded",
        "seen_elsewhere",
        "token_count",
        "unused",
    )

    def __init__(self, token_count: int, chunk_size: int) -> None:
        """`token_count`: tokens of the prompt. Until it is asked for, it cannot be cached."""
        self.token_count = token_count
        self.chunk_size = chunk_size
        self.create_time = time.time()
        self.seen_elsewhere: MissReason | None = None
        """The reason why stored chunks of the same first tokens are not found, if they are in another namespace."""
        self.unused = MissReason.LOAD_FAILED
        """The reason why tokens of the hit were not loaded."""
        self.is_taken = False
        """Whether the engine has begun to compute the rest of the prompt."""
        self.loaded: Mapping[str, int] = {}
        """Tokens that were loaded, by tier."""
        self._computed_count = 0
        self._unanswered: MissReason | None = MissReason.UNCACHEABLE
        self._hit_tokens = 0
        self._missed: list[PromptSpan] = []

    def unanswered(self, reason: MissReason) -> None:
        """The lookup has no answer, or has none yet."""
        if not self.is_taken:
            self._unanswered = reason

    def answered(self, hit_tokens: int, missed: Sequence[PromptSpan]) -> None:
        """The lookup has found the first `hit_tokens`; `missed` are the chunks that are not completely in the hit."""
        if not self.is_taken:
            self._unanswered, self._hit_tokens = None, hit_tokens
            self._missed = [_copied(span) for span in missed]  # the answer itself is large
            self.unused = MissReason.LOAD_FAILED

    def node_lost(self) -> None:
        """The node is lost: an answer that has not arrived never will, and nothing more of the hit can be loaded."""
        if not self.is_taken:
            self.unused = MissReason.NODE_LOST
            if self._unanswered is MissReason.LOOKUP_TIMEOUT:
                self._unanswered = MissReason.NODE_LOST

    def take(self, computed_count: int, loaded: Mapping[str, int]) -> bool:
        """Fixes the account: the engine has the first `computed_count` tokens itself, and those behind are `loaded`.

        `loaded` is by tier. False, with no effect, if it was fixed before.
        """
        if self.is_taken:
            return False
        self.is_taken = True
        self._computed_count, self.loaded = min(computed_count, self.token_count), loaded
        return True

    def correct(self, loaded: Mapping[str, int], reason: MissReason) -> None:
        """The load has brought only this, for that reason."""
        self.loaded, self.unused = loaded, reason

    def spans(self) -> list[PromptSpan]:
        """The whole prompt. A token that is only computed because an engine must compute one is not missed."""
        spans = [PromptSpan(token_count=self._computed_count, tier=ENGINE)] if self._computed_count else []
        spans += [PromptSpan(token_count=count, tier=tier) for tier, count in self.loaded.items() if count]
        position, end = sum(span.token_count for span in spans), self.token_count
        if position >= end or (self._hit_tokens >= end and position == end - 1):
            return spans
        if self._unanswered:
            return [*spans, PromptSpan(token_count=end - position, reason=reason_to_proto(self._unanswered))]
        if position < self._hit_tokens:
            unused = PromptSpan(token_count=self._hit_tokens - position, reason=reason_to_proto(self.unused))
            spans.append(unused)
            position = self._hit_tokens
        return spans + self._behind(position)

    def _behind(self, position: int) -> list[PromptSpan]:
        """Returns the spans that were not found, from a position behind the hit on."""
        spans = []
        stop = self._hit_tokens // self.chunk_size * self.chunk_size
        for missed in self._missed:
            stop += missed.chunk_count * self.chunk_size
            if (count := min(stop, self.token_count) - position) > 0:
                span = _copied(missed)
                span.chunk_count, span.token_count = 0, count
                spans.append(span)
                position += count
        if rest := self.token_count - position:  # shorter than a chunk, where such chunks are not stored
            spans.append(PromptSpan(token_count=rest, reason=reason_to_proto(MissReason.UNCACHEABLE)))
        return spans


def failure_reason(loaded: pb.LoadedChunks, tier: str) -> MissReason:
    """Returns the reason why a load has ended without all chunks; `tier` was to bring the first that lacks."""
    is_unreachable = tier == PEERS and isinstance(from_status(loaded.status), Unreachable)
    return MissReason.PEER_UNREACHABLE if is_unreachable else MissReason.LOAD_FAILED


def _copied(span: PromptSpan) -> PromptSpan:
    copy = PromptSpan()
    copy.CopyFrom(span)
    return copy


class PromptAccounts:
    """Counts, logs and reports the accounts of an engine's requests when these end."""

    def __init__(self, counters: Counters) -> None:
        """`counters` get missed tokens by their reason."""
        self._counters = counters
        self._reports: list[RequestReport] = []

    def close(self, engine_request_id: str, account: PromptAccount) -> None:
        """Counts a request's misses; nothing if the engine has not begun to compute it."""
        if not account.is_taken:
            return
        report = RequestReport(engine_request_id=engine_request_id[:MAX_ID_LENGTH], spans=account.spans())
        report.create_time.FromMilliseconds(round(account.create_time * 1000))
        self._count_all(report.spans)
        if len(self._reports) < MAX_REPORTS:
            self._reports.append(report)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("[%s] prompt of %d tokens: %s", engine_request_id, account.token_count, describe(report.spans))

    def count(self, account: PromptAccount) -> None:
        """Counts a request's misses, and reports nothing."""
        self._count_all(account.spans())

    def _count_all(self, spans: Iterable[PromptSpan]) -> None:
        for span in spans:
            if reason := reason_from_proto(span.reason):
                self._counters.add("miss_tokens", span.token_count, label=reason)

    @property
    def has_reports(self) -> bool:
        """Whether there are reports that were not sent yet."""
        return bool(self._reports)

    def take_reports(self) -> list[RequestReport]:
        """Reports that were not sent yet."""
        reports, self._reports = self._reports, []
        return reports


MAX_BEGINNINGS = 4096
"""Beginnings of prompts that are remembered."""


class Beginnings:
    """The first tokens of prompts, and the cache salts and roots of key chains under which they were served last."""

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, cache_salt: str, tokens: Tokens, extra: bytes, root: ChunkKey) -> MissReason | None:
        """Notes a prompt with these first tokens; returns how the namespace of the last prompt with them differs."""
        salt = sha256(cache_salt.encode()).digest()
        beginning = sha256(b"\0".join((extra, tokens.tobytes()))).digest()
        other_root = _replace(self._roots, beginning + salt, root)
        other_salt = _replace(self._salts, beginning, salt)
        if other_root:
            return MissReason.OTHER_NAMESPACE
        return MissReason.OTHER_SALT if other_salt else None


def _replace(values: OrderedDict[bytes, bytes], key: bytes, value: bytes) -> bool:
    """Sets the value of a key as the latest; whether it had another value."""
    earlier = values.pop(key, value)
    values[key] = value
    if len(values) > MAX_BEGINNINGS:
        values.popitem(last=False)
    return earlier != value


def spans_in_answer(spans: Sequence[PromptSpan]) -> list[dict[str, str | int]]:
    """The spans as JSON, for the answer to a request that has asked for them.

    Clients do not learn that there are other salts.
    """
    found: list[dict[str, str | int]] = []
    for span in spans:
        one: dict[str, str | int] = {"token_count": span.token_count}
        if span.tier:
            one["tier"] = span.tier
        if span.reason:
            is_secret = span.reason == MISS_REASON_OTHER_SALT
            one["reason"] = MissReason.NEVER_STORED.value if is_secret else reason_name(span.reason)
        if span.HasField("remove_time"):
            one["remove_time"] = span.remove_time.ToJsonString()
        found.append(one)
    return found
