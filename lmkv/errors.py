"""The errors of lmkv. Each class has one reason, made of its name, and one gRPC status code.

A cache miss is never an error. `lmkv.rpc.error_status` converts errors to gRPC statuses and back.

    LmkvError
    ├── BadRequest           INVALID_ARGUMENT     the caller must change what it sends
    ├── Missing              NOT_FOUND            the named resource does not exist
    ├── Conflict             FAILED_PRECONDITION  the current state does not allow it
    ├── Full                 RESOURCE_EXHAUSTED   no capacity now
    ├── Unauthenticated      UNAUTHENTICATED      the caller is unknown
    ├── PermissionDenied     PERMISSION_DENIED    the caller's role does not allow it
    ├── MessageTooLarge      RESOURCE_EXHAUSTED   a message exceeds the limit of its transport
    ├── InstanceIdInUse      ALREADY_EXISTS
    ├── OperationCancelled   CANCELLED
    ├── ChunkArrived         ABORTED
    ├── RevisionCompacted    OUT_OF_RANGE
    ├── Unreachable          UNAVAILABLE          a peer did not answer
    └── ConfigError          never sent           the configuration is invalid
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import ClassVar

MAX_RETRY_SECONDS = 3600.0
"""Longest delay that another process may request."""


class LmkvError(Exception):
    """Base of all errors that lmkv raises.

    The keyword arguments are the variable parts of the message; they are sent as `ErrorInfo.metadata`.
    """

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    reason: ClassVar[str] = "INTERNAL"
    """`ErrorInfo.reason`, unique per class: by default its name, as `BAD_TOKENS` of `BadTokens`."""
    by_reason: ClassVar[dict[str, type[LmkvError]]] = {}
    delay_seconds: float = 0.0
    """Time for which a server delays this answer. Set where a caller exceeds its limits; not sent."""

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()
        LmkvError.by_reason[cls.reason] = cls

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {name: str(value) for name, value in metadata.items()}


class BadRequest(LmkvError):
    """The request can never succeed as it is."""

    code = "INVALID_ARGUMENT"


class BadChunkKey(BadRequest):
    """A list of chunk keys is not a multiple of 16 bytes, or too long."""


class BadTokens(BadRequest):
    """A token id is negative or beyond the vocabulary, or a request names chunks in two ways."""


class BadKvSpec(BadRequest):
    """A spec's fingerprint is not the digest of its fields, its chunks are too large, or a served model is invalid."""


class BadInstance(BadRequest):
    """An instance has no id, or an invalid address."""


class BadMessage(BadRequest):
    """A message cannot be decoded, did not arrive, has a time out of range, or is out of order in a stream."""


class BadPageToken(BadRequest):
    """A page token does not come from this RPC."""


class BadSelection(BadRequest):
    """A request selects no chunks."""


class Missing(LmkvError):
    """The resource that the request names does not exist."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class ModelNotFound(Missing):
    """No registered spec has this model name or fingerprint."""


class InstanceNotFound(Missing):
    """The instance is not registered."""


class EngineNotFound(Missing):
    """No such engine is attached."""


class GrantNotFound(Missing):
    """The grant has expired, was released, or never existed."""


class SessionNotFound(Missing):
    """The caller has no such session at the node; `Init` opens one."""


class ChunkNotFound(Missing):
    """A chunk is not in the tier from which it was to be read."""


class PinNotFound(Missing):
    """No pin of this id is in force, and none has ended lately."""


class OperationNotFound(Missing):
    """No operation has this name, or its record has expired."""


class Conflict(LmkvError):
    """The current state does not allow the request."""

    code = "FAILED_PRECONDITION"


class ModelAmbiguous(Conflict):
    """Several specs are registered and the request does not say which."""


class KvSpecMismatch(Conflict):
    """The chunks of the two sides are not interchangeable."""


class TierUnsupported(Conflict):
    """The instance has no such tier."""


class P2pDisabled(Conflict):
    """Transfers between nodes are disabled at this node (`enable_p2p`)."""


class VersionMismatch(Conflict):
    """Node and coordinator do not speak the same version of `lmkv.internal.v1`."""


class StaleEpoch(Conflict):
    """A newer process has registered this instance id."""


class ResyncRequired(Conflict):
    """A report was lost; the node must send a snapshot."""


class WrongInstance(Conflict):
    """The address belongs to another instance, or to another epoch of it."""


class ChannelUnsupported(Conflict):
    """The two nodes have no transfer channel in common."""


class RequestTooLarge(Conflict):
    """The request is larger than the capacity of this node."""


class ConfigConflict(Conflict):
    """The node's configuration differs from what the engine expects."""


class ChunkPinned(Conflict):
    """A chunk that was to be dropped is pinned."""


class Full(LmkvError):
    """There is no capacity now."""

    code = "RESOURCE_EXHAUSTED"

    @property
    def retry_seconds(self) -> float:
        """Time after which to retry, at most `MAX_RETRY_SECONDS`."""
        try:
            seconds = float(self.metadata["retry_seconds"])
        except (KeyError, ValueError):  # optional, and unchecked when received
            return 1.0
        return 1.0 if math.isnan(seconds) else min(max(seconds, 0.0), MAX_RETRY_SECONDS)


class NoFreeExtents(Full):
    """The pool is full of chunks that cannot be evicted."""


class WatcherTooSlow(Full):
    """The watcher's bounded queue overflowed."""


class TooManyRequests(Full):
    """The caller exceeds its rate limit, its number of concurrent requests, or the memory that these may take."""


class QuotaExceeded(Full):
    """The tenant has reached its quota."""


class MessageTooLarge(LmkvError):
    """A message has more bytes than its transport accepts. Sending it again cannot succeed, so it is no `Full`."""

    code = "RESOURCE_EXHAUSTED"


class Unauthenticated(LmkvError):
    """The call has no token, or an unknown one."""

    code = "UNAUTHENTICATED"


class PermissionDenied(LmkvError):
    """The role of the caller does not allow the call."""

    code = "PERMISSION_DENIED"


class InstanceIdInUse(LmkvError):
    """Another live process has registered this instance id."""

    code = "ALREADY_EXISTS"


class OperationCancelled(LmkvError):
    """The operation was cancelled before it was done."""

    code = "CANCELLED"


class ChunkArrived(LmkvError):
    """Another operation has brought the chunk here since the move began: this copy stays."""

    code = "ABORTED"


class RevisionCompacted(LmkvError):
    """The requested revision was compacted."""

    code = "OUT_OF_RANGE"


class Unreachable(LmkvError):
    """A peer did not answer in time, or the bytes that it sent are incomplete or damaged."""

    code = "UNAVAILABLE"


class ConfigError(LmkvError):
    """The configuration is invalid. The message names the key and the fix; the exit code is 2."""

    further: tuple[ConfigError, ...] = ()
    """The other errors of the configuration that were found with this one."""

    @classmethod
    def raise_all(cls, errors: Iterable[ConfigError]) -> None:
        """Raises the first error, with the others as `further`; nothing without errors."""
        first, *others = [*errors] or (None,)
        if first is not None:
            first.further = tuple(others)
            raise first


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the most similar known word; empty if there is none."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def forget_frames(error: BaseException) -> None:
    """Removes the traceback of an error, and the errors that led to it.

    A traceback keeps the local variables of its functions in memory. Often these refer to the error again, and then
    they stay until the garbage collector runs.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
