"""Why parts of prompts were missed: the reasons. Pure."""

from __future__ import annotations

from enum import StrEnum


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
