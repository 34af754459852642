"""Every RPC of a coordinator that has an instance: the answer is one that the proto promises; its state stays valid.

A call is a number, which selects the method, and its request. Streams get one request.
"""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from lmkv.config import CoordinatorConfig
from lmkv.internal.v1 import lookup_service_pb2 as lookup_pb
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import join_keys
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.tiers import DISK, HOST
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.coordinator.services.services import SERVICE_NAMES, Services
from tests.fuzz.inputs import Input, calls
from tests.fuzz.rpcs import call, methods_of
from tests.fuzz.virtual_loop import run as run_virtually
from tests.server.coordinator.cases import HYBRID, KEYS, PROMPT
from tests.support.node_stub import registration
from tests.support.specs import LLAMA

COVERS = (
    "lmkv_server.coordinator.services",
    "lmkv_server.coordinator.operations",
    "lmkv_server.coordinator.registry",
    "lmkv_server.coordinator.core",
    "lmkv.rpc.requests",
    "lmkv.rpc.error_status",
    "lmkv.spec",
    "lmkv.spec",
)
MAX_CALLS = 6
METHODS = methods_of(SERVICE_NAMES)
_NUMBERS = {f"{method.containing_service.name}.{method.name}": number for number, method in enumerate(METHODS)}
NAMED: dict[str, Any] = {"prompt": by_tokens(PROMPT, model_name="llama")}
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


_KEYED: dict[str, Any] = {"prompt": by_keys(KEYS)}
_PACKED: dict[str, Any] = {"chunk_keys": join_keys(KEYS)}
_ON_DISK = chunk_pb2.Position(instance_id="a", tier=DISK)
_AT = chunk_pb2.Position(instance_id="a", tier=HOST)
SEEDS = [
    _calls(("CacheService.Lookup", pb.LookupRequest(**NAMED)), ("CacheService.Lookup", pb.LookupRequest(**_KEYED))),
    _calls(("LookupService.Lookup", lookup_pb.LookupRequest(**_PACKED, parent_key=KEYS[0]))),
    _calls(("LookupService.Lookup", lookup_pb.LookupRequest(**_PACKED, any_key=True, excluded_instance_id="b"))),
    _calls(
        (
            "CacheService.LookupStream",
            pb.LookupStreamRequest(requests=[pb.LookupRequest(**NAMED), pb.LookupRequest(**_KEYED)]),
        )
    ),
    _calls(
        ("CacheService.Watch", pb.WatchRequest(start_revision=1)),
        ("CacheService.Watch", pb.WatchRequest(fingerprint=LLAMA.fingerprint)),
    ),
    _calls(("CacheService.Move", pb.MoveRequest(old_position=_AT, new_position=_ON_DISK, **NAMED))),
    _calls(
        ("CacheService.Clear", pb.ClearRequest(instance_id="a", **_KEYED)),
        ("CacheService.Drain", pb.DrainRequest(instance_id="a")),
    ),
    _calls(
        ("CacheService.Pin", pb.PinRequest(position=_AT, ttl=Duration(seconds=5), **_KEYED)),
        ("CacheService.ListPins", pb.ListPinsRequest()),
    ),
    _calls(
        ("CacheService.Unpin", pb.UnpinRequest(pin_id="pin-1")),
        ("CacheService.Explain", pb.ExplainRequest(instance_id="a", **NAMED)),
    ),
    _calls(
        (
            "CacheService.Hint",
            pb.HintRequest(instance_id="a", action=chunk_pb2.HINT_ACTION_PIN, ttl=Duration(seconds=9), **NAMED),
        )
    ),
    _calls(("RegistryService.Register", registration(INSTANCE, bytes(16)))),
    _calls(
        ("ReportService.Report", SNAPSHOT),
        ("RegistryService.ListInstances", registry_pb.ListInstancesRequest(page_size=1)),
    ),
    _calls(("RegistryService.LocateInstance", registry_pb.LocateInstanceRequest(instance_id="a"))),
    _calls(
        ("Operations.ListOperations", operations_pb2.ListOperationsRequest(page_size=1, filter="done=true")),
        ("Operations.GetOperation", operations_pb2.GetOperationRequest(name="operations/move-1")),
        ("Operations.WaitOperation", operations_pb2.WaitOperationRequest(name="x", timeout=Duration(seconds=5))),
        ("Operations.CancelOperation", operations_pb2.CancelOperationRequest(name="operations/1")),
    ),
]


def run(data: bytes) -> None:
    """Makes the calls of an input."""
    run_virtually(_run(Input(data)))


async def _run(source: Input) -> None:
    services = Services(CoordinatorConfig(lease_ttl=30.0, cluster_secret="hush"))
    try:
        await _prepare(services)
        handlers = services.cache, services.registry, services.reports, services.node_lookups, services.operations
        servicers: dict[str, Any] = dict(zip(SERVICE_NAMES, handlers, strict=True))
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
