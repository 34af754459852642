"""What a record has of each message: names, keys, revisions and results, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from google.longrunning import operations_pb2
from google.protobuf.json_format import MessageToDict

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.internal.v1 import lookup_service_pb2 as lookup_pb
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import split_keys
from lmkv.v1 import cache_service_pb2 as cache_pb
from lmkv.v1 import peer_service_pb2 as peer_pb
from lmkv.v1 import registry_service_pb2 as registry_pb

Summary = dict[str, Any]
RESULTS = (cache_pb.MoveResult, cache_pb.ClearResult, cache_pb.DrainResult)


def key_name(key: bytes) -> str:
    """`PROMPT/CHUNK`, as the keys of these tests are made."""
    return f"{int.from_bytes(key[:8], 'big')}/{int.from_bytes(key[8:], 'big')}"


def key_names(keys: bytes) -> list[str]:
    """The names of packed keys."""
    return [key_name(key) for key in split_keys(keys)]


class Method(NamedTuple):
    """How a unary call is recorded."""

    call: str
    request_type: Any
    request: Callable[[Any], Summary]
    answer_type: Any
    answer: Callable[[Any], Summary]


def lookup_request(request: cache_pb.LookupRequest) -> Summary:
    return {"keys": key_names(b"".join(request.prompt.keys.chunk_keys)), "excluded": request.excluded_instance_id}


def lookup_answer(answer: cache_pb.LookupResponse | lookup_pb.LookupResponse) -> Summary:
    """The tiers of each holder's chunks, in prompt order."""
    holders = {
        holder.instance_id: [tier for run in holder.runs for tier in [run.tier] * run.chunk_count]
        for holder in answer.holders
    }
    return {"revision": answer.revision, "partial": not answer.is_complete, "holders": holders}


def node_lookup_request(request: lookup_pb.LookupRequest) -> Summary:
    return {"keys": key_names(request.chunk_keys), "excluded": request.excluded_instance_id}


def watch_answer(answer: cache_pb.WatchResponse) -> Summary:
    """All changes, in order."""
    return {
        "revision": answer.revision,
        "snapshot": answer.snapshot,
        "changes": [
            {"instance": change.instance_id, "gone": True}
            if change.instance_gone
            else {
                "instance": change.instance_id,
                "tier": change.tier,
                "gained": key_names(b"".join(change.admitted_keys)),
                "lost": key_names(b"".join(change.evicted_keys)),
            }
            for change in answer.changes
        ],
    }


def operation_answer(operation: operations_pb2.Operation) -> Summary:
    """Whether it has ended, and how. `failures` lists reasons: messages differ with what a process saw."""
    if not operation.done:
        return {"done": False, "result": {}}
    if operation.HasField("error"):
        return {"done": True, "result": {"error": rpc.from_status(operation.error).reason}}
    for kind in RESULTS:
        result = kind()
        if operation.response.Unpack(result):
            fields = MessageToDict(result, preserving_proto_field_name=True)
            return {"done": True, "result": fields | ({"failures": len(result.failures)} if result.failures else {})}
    return {"done": True, "result": {}}


def report_request(report: report_pb.ReportRequest, layout_map_id: str) -> Summary:
    """The chunks that a report states."""
    return {
        "instance": report.instance_id,
        "epoch": report.epoch,
        "sequence": report.sequence,
        "snapshot": report.snapshot,
        "snapshot_end": report.snapshot_end,
        "map": layout_map_id,
        "changes": [
            {
                "tier": change.tier,
                "gained": key_names(change.admitted_keys),
                "lost": key_names(change.evicted_keys),
            }
            for change in report.changes
        ],
    }


def order_request(order: report_pb.Order) -> tuple[str, Summary] | None:
    """The call and request of an order that moves or drops chunks; None for all others."""
    if order.HasField("fetch"):
        call, keys = "Fetch", order.fetch.chunk_keys
    elif order.HasField("drop") and order.drop.chunk_keys:
        call, keys = "Drop", order.drop.chunk_keys
    else:
        return None
    return call, {"id": order.order_id, "operation": order.operation_name, "keys": key_names(keys)}


def outcome_answer(outcome: report_pb.OrderOutcome, keys: list[str]) -> Summary:
    """The keys for which an order failed: all if it does not account for each of them."""
    failed = [name for failure in outcome.failures for name in key_names(b"".join(failure.chunk_keys))]
    is_whole = outcome.chunk_count + len(failed) == len(keys)
    return {"failed": failed if is_whole else keys, "status": outcome.status.code}


def _selection(request: Any, **fields: Any) -> Summary:
    return {"keys": key_names(b"".join(request.prompt.keys.chunk_keys)), "request_id": request.request_id} | fields


METHODS: Mapping[str, Method] = {
    "CacheService/Lookup": Method(
        "Lookup", cache_pb.LookupRequest, lookup_request, cache_pb.LookupResponse, lookup_answer
    ),
    "LookupService/Lookup": Method(
        "Lookup", lookup_pb.LookupRequest, node_lookup_request, lookup_pb.LookupResponse, lookup_answer
    ),
    "CacheService/Move": Method(
        "Move",
        cache_pb.MoveRequest,
        lambda request: _selection(
            request,
            source=request.old_position.instance_id,
            destination=request.new_position.instance_id,
            copy=request.copy,
        ),
        operations_pb2.Operation,
        lambda operation: {"operation": operation.name},
    ),
    "CacheService/Clear": Method(
        "Clear",
        cache_pb.ClearRequest,
        lambda request: _selection(request, instance=request.instance_id, tier=request.tier),
        operations_pb2.Operation,
        lambda operation: {"operation": operation.name},
    ),
    "CacheService/Pin": Method(
        "Pin",
        cache_pb.PinRequest,
        lambda request: _selection(
            request, instance=request.position.instance_id, ttl=request.ttl.ToNanoseconds() / 1e9
        ),
        cache_pb.PinResponse,
        lambda answer: {"pin": answer.pin.pin_id, "chunks": answer.pin.chunk_count},
    ),
    "CacheService/Unpin": Method(
        "Unpin",
        cache_pb.UnpinRequest,
        lambda request: {"pin": request.pin_id},
        cache_pb.UnpinResponse,
        lambda _: {},
    ),
    "Operations/GetOperation": Method(
        "GetOperation",
        operations_pb2.GetOperationRequest,
        lambda request: {"operation": request.name},
        operations_pb2.Operation,
        operation_answer,
    ),
    "RegistryService/Register": Method(
        "Register",
        registry_pb.RegisterRequest,
        lambda request: {"instance": request.instance.instance_id, "epoch": request.instance.epoch},
        registry_pb.RegisterResponse,
        lambda answer: {"map": answer.layout_map_id, "lease": answer.lease_ttl.ToNanoseconds() / 1e9},
    ),
    "PeerService/Acquire": Method(
        "Acquire",
        peer_pb.AcquireRequest,
        lambda request: {"keys": key_names(request.chunk_keys), "epoch": request.peer_epoch},
        peer_pb.AcquireResponse,
        lambda answer: {
            "grant": answer.grant.grant_id,
            "present": list(answer.present),
            "extents": len(answer.grant.chunks),
        },
    ),
}

MAY_HAVE_HAPPENED = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"})
"""Codes of errors that leave open whether the call had its effect."""


def error_answer(error: LmkvError) -> Summary:
    """Of a call that failed."""
    return {"error": error.reason or error.code}
