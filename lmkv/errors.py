"""Every way lmkv can refuse: one class is one reason is one gRPC code.

A miss is never an error. `lmkv.rpc.endpoints` carries these over the wire in both directions.

    LmkvError
    ├── BadRequest           INVALID_ARGUMENT     the caller must change what it sends
    ├── Missing              NOT_FOUND            what it names is not there
    ├── Conflict             FAILED_PRECONDITION  the state of things forbids it
    ├── Full                 RESOURCE_EXHAUSTED   no room now
    ├── Unauthenticated      UNAUTHENTICATED      nobody knows who asks
    ├── PermissionDenied     PERMISSION_DENIED    somebody else may ask this
    ├── InstanceIdInUse      ALREADY_EXISTS
    ├── OperationCancelled   CANCELLED
    ├── OperationTakenOver   ABORTED
    ├── RevisionCompacted    OUT_OF_RANGE
    ├── Unreachable          UNAVAILABLE          a peer did not answer
    └── ConfigError          never on the wire    a process cannot start as configured
"""

from __future__ import annotations

from typing import ClassVar


class LmkvError(Exception):
    """Base of everything lmkv raises on purpose.

    The keyword arguments are the dynamic words of the message; they travel as `ErrorInfo.metadata`.
    """

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    reason: ClassVar[str] = "INTERNAL"
    """`ErrorInfo.reason`, unique per class."""
    by_reason: ClassVar[dict[str, type[LmkvError]]] = {}

    def __init_subclass__(cls) -> None:
        LmkvError.by_reason[cls.reason] = cls

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {name: str(value) for name, value in metadata.items()}


class BadRequest(LmkvError):
    """The request can never succeed as it is."""

    code = "INVALID_ARGUMENT"
    reason = "BAD_REQUEST"


class BadChunkKey(BadRequest):
    """A list of chunk keys is not a multiple of 16 bytes, or too long."""

    reason = "BAD_CHUNK_KEY"


class BadTokens(BadRequest):
    """A token id is negative or beyond the vocabulary, or chunks are named in two ways at once."""

    reason = "BAD_TOKENS"


class BadKvSpec(BadRequest):
    """A spec's fingerprint is not the digest of its fields, its chunks cannot fit, or a served model of it is bad."""

    reason = "BAD_KV_SPEC"


class BadInstance(BadRequest):
    """An instance has no id, or an address that does not parse."""

    reason = "BAD_INSTANCE"


class BadMessage(BadRequest):
    """A message cannot be decoded, did not arrive, has a time out of range, or does not fit into its stream."""

    reason = "BAD_MESSAGE"


class BadPageToken(BadRequest):
    """A page token was not made by this call."""

    reason = "BAD_PAGE_TOKEN"


class BadSelection(BadRequest):
    """A request that selects chunks selects none."""

    reason = "BAD_SELECTION"


class Missing(LmkvError):
    """What the request names is not there."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class ModelNotFound(Missing):
    """No registered spec has this model name or fingerprint."""

    reason = "MODEL_NOT_FOUND"


class InstanceNotFound(Missing):
    """The instance is not registered."""

    reason = "INSTANCE_NOT_FOUND"


class EngineNotFound(Missing):
    """No such engine is attached."""

    reason = "ENGINE_NOT_FOUND"


class GrantNotFound(Missing):
    """The grant has ended or never was."""

    reason = "GRANT_NOT_FOUND"


class SessionNotFound(Missing):
    """The caller has no such session at a node: `Init` opens one."""

    reason = "SESSION_NOT_FOUND"


class ChunkNotFound(Missing):
    """A chunk is not held where it was to be taken from."""

    reason = "CHUNK_NOT_FOUND"


class OperationNotFound(Missing):
    """No operation has this name, or it ended too long ago."""

    reason = "OPERATION_NOT_FOUND"


class Conflict(LmkvError):
    """The state of things forbids the request."""

    code = "FAILED_PRECONDITION"
    reason = "CONFLICT"


class ModelAmbiguous(Conflict):
    """Several specs are registered and the request does not say which."""

    reason = "MODEL_AMBIGUOUS"


class KvSpecMismatch(Conflict):
    """The chunks of the two ends are not interchangeable."""

    reason = "KV_SPEC_MISMATCH"


class TierUnsupported(Conflict):
    """The instance has no such tier."""

    reason = "TIER_UNSUPPORTED"


class P2pDisabled(Conflict):
    """A node was configured without transfers between nodes (`enable_p2p`)."""

    reason = "P2P_DISABLED"


class StaleEpoch(Conflict):
    """A newer process took this instance id."""

    reason = "STALE_EPOCH"


class ResyncRequired(Conflict):
    """A report was lost; the stream must begin anew with a snapshot."""

    reason = "RESYNC_REQUIRED"


class WrongInstance(Conflict):
    """Another instance, or another epoch of it, answers here."""

    reason = "WRONG_INSTANCE"


class ChannelUnsupported(Conflict):
    """The two ends share no transfer channel."""

    reason = "CHANNEL_UNSUPPORTED"


class RequestTooLarge(Conflict):
    """The request will never fit into this node."""

    reason = "REQUEST_TOO_LARGE"


class ConfigConflict(Conflict):
    """The engine expects a node of another configuration."""

    reason = "CONFIG_CONFLICT"


class ChunkPinned(Conflict):
    """A chunk that was to be dropped is kept by a pin."""

    reason = "CHUNK_PINNED"


class Full(LmkvError):
    """There is no room now."""

    code = "RESOURCE_EXHAUSTED"
    reason = "FULL"

    @property
    def retry_seconds(self) -> float:
        """When to come back."""
        try:
            return max(float(self.metadata["retry_seconds"]), 0.0)
        except (KeyError, ValueError):  # who refuses need not say, and what comes over the wire may be anything
            return 1.0


class NoFreeExtents(Full):
    """The pool is full of chunks that may not be evicted."""

    reason = "NO_FREE_EXTENTS"


class WatcherTooSlow(Full):
    """The watcher fell behind its bounded queue."""

    reason = "WATCHER_TOO_SLOW"


class TooManyRequests(Full):
    """The caller asks more, or more often, than it may."""

    reason = "TOO_MANY_REQUESTS"


class QuotaExceeded(Full):
    """The tenant has as much as it may have."""

    reason = "QUOTA_EXCEEDED"


class Unauthenticated(LmkvError):
    """The call shows no token, or one that nobody knows."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(LmkvError):
    """The caller is known, and may not do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class InstanceIdInUse(LmkvError):
    """Another living process holds this instance id."""

    code = "ALREADY_EXISTS"
    reason = "INSTANCE_ID_IN_USE"


class OperationCancelled(LmkvError):
    """Somebody cancelled the operation before it was done."""

    code = "CANCELLED"
    reason = "OPERATION_CANCELLED"


class OperationTakenOver(LmkvError):
    """Another coordinator sees the operation through by now; orders of an earlier attempt at it are refused."""

    code = "ABORTED"
    reason = "OPERATION_TAKEN_OVER"


class RevisionCompacted(LmkvError):
    """The revision asked for is no longer known."""

    code = "OUT_OF_RANGE"
    reason = "REVISION_COMPACTED"


class Unreachable(LmkvError):
    """A peer did not answer, in time or at all, or moved bytes that did not arrive whole."""

    code = "UNAVAILABLE"
    reason = "UNREACHABLE"


class ConfigError(LmkvError):
    """A process cannot start as configured. Its message names the key and the fix; the exit code is 2."""

    reason = "CONFIG_ERROR"
