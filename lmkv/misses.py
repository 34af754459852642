"""Why parts of prompts were missed: the reasons, advice for each, their form in protos, and a memory of lost chunks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lmkv.keys import ChunkKey
from lmkv.v1 import chunk_pb2


class MissReason(StrEnum):
    """Why a part of a prompt was not found, or was found and not loaded: `MissReason` in `chunk.proto` says it in full.

    The values are those of the label `reason`.
    """

    NEVER_STORED = "never_stored"
    EVICTED_BY_STORE = "evicted_by_store"
    EVICTED_BY_FETCH = "evicted_by_fetch"
    EVICTED_BY_ORDER = "evicted_by_order"
    EVICTED_FROM_TIER = "evicted_from_tier"
    CLEARED = "cleared"
    DROPPED = "dropped"
    DAMAGED = "damaged"
    TIER_DOWN = "tier_down"
    PEER_UNREACHABLE = "peer_unreachable"
    SLOWER = "slower"
    BELOW_MINIMUM = "below_minimum"
    TOO_LARGE = "too_large"
    BEHIND_GAP = "behind_gap"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_SALT = "other_salt"
    SKIPPED = "skipped"
    LOAD_FAILED = "load_failed"
    LOOKUP_TIMEOUT = "lookup_timeout"
    NODE_LOST = "node_lost"
    NODE_SUSPECT = "node_suspect"
    UNCACHEABLE = "uncacheable"
    AUDITED = "audited"


ADVICE: Mapping[MissReason, str] = {
    MissReason.NEVER_STORED: "nothing, if new; after restarts: persist_pool, local_disk",
    MissReason.EVICTED_BY_STORE: "raise max_local_cpu_size, or add local_disk or remote_url",
    MissReason.EVICTED_BY_FETCH: "raise max_local_cpu_size, or route a session to one instance",
    MissReason.EVICTED_BY_ORDER: "move or drain to an instance with free memory",
    MissReason.EVICTED_FROM_TIER: "raise max_local_disk_size, or add remote_url",
    MissReason.CLEARED: "find the reset or the clear: engine's log, lmkv ops",
    MissReason.DROPPED: "find the move or the clear: lmkv ops",
    MissReason.DAMAGED: "check the host's memory and disks; the node's log names chunks",
    MissReason.TIER_DOWN: "repair the folder, store or coordinator: the node's log names it",
    MissReason.PEER_UNREACHABLE: "check the network between instances: p2p_host, p2p_port",
    MissReason.SLOWER: "nothing; refuse_slow_fetches: false loads it anyway",
    MissReason.BELOW_MINIMUM: "lower min_retrieve_tokens or min_fetch_tokens",
    MissReason.TOO_LARGE: "raise max_local_cpu_size: an engine may hold half of the pool",
    MissReason.BEHIND_GAP: "see the part before it",
    MissReason.OTHER_NAMESPACE: "nothing: KV depends on the adapter and on the weights",
    MissReason.OTHER_SALT: "one cache_salt for the users who may share",
    MissReason.SKIPPED: "raise max_local_cpu_size: stores found no free memory",
    MissReason.LOAD_FAILED: "read the node's log at that time",
    MissReason.LOOKUP_TIMEOUT: "give the node more CPU time, or raise lookup_timeout",
    MissReason.NODE_LOST: "read why the node ended: node.log",
    MissReason.NODE_SUSPECT: "give the node more CPU time, or raise lookup_timeout",
    MissReason.UNCACHEABLE: "for ends of prompts: save_partial_chunks: true",
    MissReason.AUDITED: "nothing; audit_rate: 0 computes nothing again",
}


WAYS = 4
"""Entries that a key may be in."""
HEAD_BYTES = 8
"""Bytes of a key that the memory keeps."""
CODE_BITS = 16
"""Bits of an entry for the reason and the tier."""
MAX_TIERS = 256
CAPACITY = 1 << 17
"""Entries of a memory, unless another number is given: 2 MiB."""

_REASONS = list(MissReason)
_NUMBERS = {reason: number for number, reason in enumerate(_REASONS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Why and when a chunk was lost."""

    tier: str
    """The tier that it left."""
    reason: MissReason
    time: float
    """Seconds since 1970."""


class LossMemory:
    """The reason and time of each key's last loss, in 16 bytes a key. Constant time; the oldest entries are replaced.

    A key is found by its first 8 bytes; each has four entries that it may be in. Memory is taken once and never grows.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity` is the number of entries, a multiple of 4."""
        assert capacity >= WAYS
        assert capacity % WAYS == 0
        self._set_count = capacity // WAYS
        self._heads = array("Q", bytes(HEAD_BYTES * capacity))
        self._losses = array("Q", bytes(HEAD_BYTES * capacity))
        """Milliseconds since 1970, then numbers of reason and tier: the oldest is the smallest. 0 in a free entry."""
        self._tiers: list[str] = []

    def add(self, key: ChunkKey, tier: str, reason: MissReason, time: float) -> None:
        """Records the loss of a key from a tier at `time`, in seconds since 1970, in place of an earlier one."""
        head, entries = self._entries(key)
        at = next((entry for entry in entries if self._heads[entry] == head), None)
        if at is None:
            at = min(entries, key=self._losses.__getitem__)
        self._heads[at] = head
        self._losses[at] = int(time * 1000) << CODE_BITS | _NUMBERS[reason] * MAX_TIERS | self._tier_number(tier)

    def discard(self, key: ChunkKey) -> None:
        """Forgets the key: it is held again."""
        head, entries = self._entries(key)
        for entry in entries:
            if self._heads[entry] == head:
                self._losses[entry] = self._heads[entry] = 0

    def get(self, key: ChunkKey) -> Loss | None:
        """The key's last loss; None if there was none since it was held, or it is forgotten."""
        head, entries = self._entries(key)
        for entry in entries:
            if self._heads[entry] == head and (loss := self._losses[entry]):
                reason, tier = divmod(loss % (1 << CODE_BITS), MAX_TIERS)
                return Loss(tier=self._tiers[tier], reason=_REASONS[reason], time=(loss >> CODE_BITS) / 1000)
        return None

    def __len__(self) -> int:
        return sum(map(bool, self._losses))

    def _tier_number(self, tier: str) -> int:
        if tier not in self._tiers:
            assert len(self._tiers) < MAX_TIERS
            self._tiers.append(tier)
        return self._tiers.index(tier)

    def _entries(self, key: ChunkKey) -> tuple[int, range]:
        head = int.from_bytes(key[:HEAD_BYTES], "little")
        first = head % self._set_count * WAYS
        return head, range(first, first + WAYS)


def reason_to_proto(reason: MissReason) -> chunk_pb2.MissReason.ValueType:
    """The value of the proto's enum."""
    return chunk_pb2.MissReason.Value(f"MISS_REASON_{reason.name}")


def reason_from_proto(number: int) -> MissReason | None:
    """The reason of a proto's value; None if it is unset, or newer than this version."""
    return _BY_NUMBER.get(number)


def describe(spans: Iterable[chunk_pb2.PromptSpan]) -> str:
    """The spans for a log: `256 own, 512 evicted_by_store`."""
    return ", ".join(f"{span.token_count} {reason_name(span.reason) or span.tier}" for span in spans)


def reason_name(number: int) -> str:
    """The reason in words; its number, if it is newer than this version, and empty if it is unset."""
    reason = _BY_NUMBER.get(number)
    return reason.value if reason else str(number) if number else ""


_BY_NUMBER = {int(reason_to_proto(reason)): reason for reason in MissReason}
