"""A hint about one prompt, as the node carries it out, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lmkv.errors import BadMessage
from lmkv.hints import MAX_PRIORITY, HintAction, HintOutcome, HintReason, HintResult, reject
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import KEY_BYTES, ChunkKey, split_keys
from lmkv.prompt import Prompt
from lmkv.rpc.messages import ACTIONS_BY_NUMBER, MAX_HINT_KEYS
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv_server.node.cache.host import HostTier

MAX_ID_BYTES = 64
TIMED = (HintAction.PIN, HintAction.RETAIN)
"""Actions that have a ttl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptHint:
    """A hint about the chunks of one prompt."""

    hint_id: str
    """Unique in the node."""
    action: HintAction
    spec: KvSpec
    keys: Sequence[ChunkKey]
    """Keys of the chunks, as those of part 0."""
    owner: bytes
    """Whose quota it takes: the root of the prompt's key chain, or a digest of a client's name."""
    ttl_seconds: float = 0.0
    priority: int = 0
    is_running: bool = False
    """Whether the prompt's request still runs, and the hint is sent again."""

    @classmethod
    def read(
        cls,
        message: engine_pb.HintChunks | report_pb.HintOrder,
        spec: KvSpec,
        *,
        engine_id: str = "",
        owner: bytes,
        is_running: bool = False,
    ) -> Self:
        """The hint of an engine, or of an order. Raises `BadMessage` or `BadChunkKey` if it cannot be carried out."""
        action = ACTIONS_BY_NUMBER.get(message.action)
        if action is None:
            raise BadMessage(f"this node knows no action {message.action}", field="action")
        if not 0 < len(message.hint_id.encode()) <= MAX_ID_BYTES:
            raise BadMessage(f"hint_id must have 1 to {MAX_ID_BYTES} bytes", field="hint_id")
        keys = split_keys(message.chunk_keys, limit=MAX_HINT_KEYS)
        if not keys:
            raise BadMessage("chunk_keys is empty", field="chunk_keys")
        if len(owner) != KEY_BYTES:
            raise BadMessage(f"root_key or owner must have {KEY_BYTES} bytes", field="owner")
        ttl_seconds = message.ttl.ToNanoseconds() / 1e9
        if action in TIMED and ttl_seconds <= 0:
            raise BadMessage("ttl must be positive", field="ttl")
        if action is HintAction.RETAIN and not 1 <= message.priority <= MAX_PRIORITY:
            raise BadMessage(f"priority must be from 1 to {MAX_PRIORITY}", field="priority")
        return cls(
            hint_id=f"{engine_id}:{message.hint_id}" if engine_id else message.hint_id,
            action=action,
            spec=spec,
            keys=keys,
            owner=owner,
            ttl_seconds=ttl_seconds,
            priority=message.priority,
            is_running=is_running,
        )

    def prompt(self, tier: HostTier) -> Prompt:
        """Its prompt. If the pool has the last chunk, it is known how many tokens that has."""
        last = tier.get(self.keys[-1])
        rest = last.token_count if last and last.fingerprint == self.spec.fingerprint else self.spec.chunk_size
        return Prompt(self.spec, self.keys, token_count=(len(self.keys) - 1) * self.spec.chunk_size + rest)

    def ended(self, outcome: HintOutcome, chunk_count: int = 0, ttl_seconds: float = 0.0) -> HintResult:
        """The result with an outcome; a pin or a retention with less time than requested is clipped."""
        if outcome is HintOutcome.ACCEPTED and self.action in TIMED and ttl_seconds < self.ttl_seconds:
            outcome = HintOutcome.CLIPPED
        return HintResult(
            action_id=self.hint_id,
            action=self.action,
            outcome=outcome,
            chunk_count=chunk_count,
            ttl_seconds=ttl_seconds,
        )

    def rejected(self, reason: HintReason, detail: str) -> HintResult:
        """The result of a hint that is not carried out."""
        return reject(self.hint_id, self.action, reason, detail)

    def reached(self, prompt_chunks: int) -> HintOutcome:
        """The outcome of a hint that was carried out for all that is held: the prompt's first chunks."""
        if prompt_chunks and prompt_chunks == len(self.keys):
            return HintOutcome.ACCEPTED
        if self.is_running:
            return HintOutcome.DEFERRED
        return HintOutcome.CLIPPED if prompt_chunks else HintOutcome.MISSING
