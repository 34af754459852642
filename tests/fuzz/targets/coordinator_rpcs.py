"""Every RPC of a coordinator that has an instance: the answer is one that the proto promises; its state stays valid.

A call is a number, which selects the method, and its request. Streams get one request.
"""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import join_keys
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.coordinator.services.services import SERVICE_NAMES, Services, make_services
from tests.fuzz.inputs import Input, calls
from tests.fuzz.rpcs import call, methods_of
from tests.fuzz.virtual_loop import run as run_virtually
from tests.server.coordinator.cases import HYBRID, KEYS, LLAMA, PROMPT
from tests.support.node_stub import registration

COVERS = (
    "lmkv_server.coordinator.services",
    "lmkv_server.coordinator.operations",
    "lmkv_server.coordinator.registry",
    "lmkv_server.coordinator.core",
    "lmkv.rpc.requests",
    "lmkv.rpc.error_status",
    "lmkv.spec",
    "lmkv.parts",
)
MAX_CALLS = 6
METHODS = methods_of(SERVICE_NAMES)
_NUMBERS = {method.name: number for number, method in enumerate(METHODS)}
HOST, DISK = chunk_pb2.TIER_HOST, chunk_pb2.TIER_DISK
NAMED: dict[str, Any] = {"tokens": PROMPT, "model_name": "llama"}
INSTANCE = registry_pb.Instance(
    instance_id="a", epoch=1, peer_address="10.0.0.1:1", specs=[LLAMA.to_proto(), HYBRID.to_proto()]
)
SNAPSHOT = report_pb.ReportRequest(
    instance_id="a",
    epoch=1,
    sequence=1,
    snapshot=True,
    snapshot_end=True,
    changes=[
        report_pb.ChunkChange(
            tier=HOST,
            fingerprint=LLAMA.fingerprint,
            admitted_keys=join_keys(KEYS),
            partial_token_counts={2: 8},
            partial_parent_keys={2: KEYS[1]},
        )
    ],
)


def _calls(*parts: tuple[str, Any]) -> bytes:
    return calls(*((_NUMBERS[name], message.SerializeToString()) for name, message in parts))


_KEYED: dict[str, Any] = {"chunk_keys": join_keys(KEYS)}
_ON_DISK = chunk_pb2.Position(instance_id="a", tier=DISK)
_AT = chunk_pb2.Position(instance_id="a", tier=HOST)
SEEDS = [
    _calls(("Lookup", pb.LookupRequest(**NAMED)), ("Lookup", pb.LookupRequest(**_KEYED, parent_key=KEYS[0]))),
    _calls(("Lookup", pb.LookupRequest(**_KEYED, any_key=True, excluded_instance_id="b"))),
    _calls(("LookupStream", pb.LookupStreamRequest(requests=[pb.LookupRequest(**NAMED), pb.LookupRequest(**_KEYED)]))),
    _calls(("Watch", pb.WatchRequest(start_revision=1)), ("Watch", pb.WatchRequest(fingerprint=LLAMA.fingerprint))),
    _calls(("Move", pb.MoveRequest(old_position=_AT, new_position=_ON_DISK, **NAMED))),
    _calls(("Clear", pb.ClearRequest(instance_id="a", **_KEYED)), ("Drain", pb.DrainRequest(instance_id="a"))),
    _calls(("Pin", pb.PinRequest(position=_AT, ttl=Duration(seconds=5), **_KEYED)), ("ListPins", pb.ListPinsRequest())),
    _calls(("Unpin", pb.UnpinRequest(pin_id="pin-1")), ("Explain", pb.ExplainRequest(instance_id="a", **NAMED))),
    _calls(
        ("Hint", pb.HintRequest(instance_id="a", action=chunk_pb2.HINT_ACTION_PIN, ttl=Duration(seconds=9), **NAMED))
    ),
    _calls(("Register", registration(INSTANCE, bytes(16)))),
    _calls(("Report", SNAPSHOT), ("ListInstances", registry_pb.ListInstancesRequest(page_size=1))),
    _calls(("LocateInstance", registry_pb.LocateInstanceRequest(instance_id="a"))),
    _calls(
        ("ListOperations", operations_pb2.ListOperationsRequest(page_size=1, filter="done=true")),
        ("GetOperation", operations_pb2.GetOperationRequest(name="operations/move-1")),
        ("WaitOperation", operations_pb2.WaitOperationRequest(name="x", timeout=Duration(seconds=5))),
        ("CancelOperation", operations_pb2.CancelOperationRequest(name="operations/1")),
    ),
]


def run(data: bytes) -> None:
    """Makes the calls of an input."""
    run_virtually(_run(Input(data)))


async def _run(source: Input) -> None:
    services = make_services(lease_ttl=30.0, cluster_secret=b"hush")
    try:
        await _prepare(services)
        servicers = dict(
            zip(SERVICE_NAMES, (services.cache, services.registry, services.reports, services.operations), strict=True)
        )
        for number, message in source.calls(MAX_CALLS):
            await call(servicers, METHODS[number % len(METHODS)], [message])
            services.core.check()
    finally:
        await services.aclose()


async def _prepare(services: Services) -> None:
    context: Any = None
    await services.registry.Register(registration(INSTANCE), context)
    stream = services.core.open_stream("a", 1, 0)
    stream.apply(SNAPSHOT, 0)
    stream.close()
