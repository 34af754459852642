"""Every RPC of a node: engines and peers get what the protos promise, and nothing stays reserved or held.

A call is a number, which selects the method, and its request.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from lmkv.errors import Unreachable
from lmkv.keys import join_keys
from lmkv.transfer.channel import ReadAccess
from lmkv.v1 import chunk_pb2
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1 import peer_service_pb2 as peer_pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.audits import Audits
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.handoff.receiver import HandoffReceiver
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.hints.executor import HintExecutor
from lmkv_server.node.serving.service import PeerService, ServedNode
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.stack import TierStack
from tests.attach import request
from tests.fuzz.inputs import Input, calls
from tests.fuzz.rpcs import call, methods_of
from tests.fuzz.virtual_loop import run as run_virtually
from tests.server.node.cases import admit, chunk_key
from tests.support.specs import small_spec

COVERS = (
    "lmkv_server.node.engines",
    "lmkv_server.node.serving.service",
    "lmkv_server.node.serving.read_grants",
    "lmkv_server.node.sessions",
    "lmkv_server.node.handoff.receiver",
    "lmkv_server.node.handoff.table",
    "lmkv_server.node.hints",
    "lmkv_server.node.cache.host",
    "lmkv.spec",
    "lmkv.spec",
)
MAX_CALLS = 6
SPEC = small_spec()
POOL_BYTES = 64 * SPEC.chunk_bytes
EPOCH = 7
SERVICES = ("lmkv.v1.EngineService", "lmkv.v1.PeerService")
METHODS = methods_of(SERVICES)
_NUMBERS = {f"{method.containing_service.name}.{method.name}": number for number, method in enumerate(METHODS)}
KEYS = [chunk_key(number) for number in range(1, 5)]
SESSION, GRANT = "s" * 32, "g" * 32
"""In a request they stand for the ids of the session and of the grant that the peer was given last."""
NEXT_PART = b"\0NEXT\0"
"""Separates the messages of a stream."""


def _calls(*parts: tuple[str, Any]) -> bytes:
    return calls(
        *(
            (
                _NUMBERS[name],
                NEXT_PART.join(one.SerializeToString() for one in (said if type(said) is list else [said])),
            )
            for name, said in parts
        )
    )


_HELLO = engine_pb.Hello(engine_id="e", spec=SPEC.to_proto(), worker_count=1)
_ACTS: list[dict[str, Any]] = [
    {"commit": [engine_pb.CommitChunk(chunk_key=KEYS[0], offset=8192, size_bytes=8192, token_count=32)]},
    {"lookup": [engine_pb.LookupChunks(lookup_id="r", chunk_keys=join_keys(KEYS), reserve_count=2)]},
    {
        "load": [engine_pb.LoadChunks(lookup_id="r", chunk_count=2, timeout=Duration(seconds=2))],
        "release": [engine_pb.ReleaseChunks(lookup_id="r", avoided_prefill_duration=Duration(seconds=1))],
    },
    {"reserve": [3, 1], "return_credits": [0, 4096], "drop_damaged": KEYS[2:]},
    {
        "reset": True,
        "change_weights": "v2",
        "end_handoff": "h",
        "serve_models": [chunk_pb2.ServedModel(name="m")],
    },
]
_INIT = peer_pb.InitRequest(
    instance_id="peer", epoch=3, peer_instance_id="node", peer_epoch=EPOCH, spec=SPEC.to_proto()
)
_NAMED: dict[str, Any] = {"peer_epoch": EPOCH, "fingerprint": SPEC.fingerprint, "chunk_keys": KEYS}
SEEDS = [
    *(_calls(("EngineService.Attach", [request(hello=_HELLO), request(**named)])) for named in _ACTS),
    _calls(
        (
            "EngineService.Attach",
            [
                request(hello=_HELLO, **_ACTS[1]),
                request(**_ACTS[2]),
                request(
                    hint=[
                        engine_pb.HintChunks(hint_id="h", action=chunk_pb2.HINT_ACTION_PIN, chunk_keys=join_keys(KEYS))
                    ],
                    report=[chunk_pb2.RequestReport(engine_request_id="r")],
                ),
            ],
        )
    ),
    _calls(
        (
            "EngineService.Lookup",
            engine_pb.EngineServiceLookupRequest(fingerprint=SPEC.fingerprint, chunk_keys=[KEYS[0]]),
        ),
        ("EngineService.Load", engine_pb.LoadRequest(fingerprint=SPEC.fingerprint, chunk_keys=[KEYS[0]])),
        ("EngineService.Release", engine_pb.EngineServiceReleaseRequest(engine_id="own", lookup_id="r")),
        ("EngineService.Lend", engine_pb.LendRequest()),
    ),
    _calls(
        ("PeerService.Init", _INIT),
        ("PeerService.Acquire", peer_pb.AcquireRequest(session_id=SESSION, ttl=Duration(seconds=1), **_NAMED)),
        ("PeerService.Release", peer_pb.ReleaseRequest(session_id=SESSION, grant_id=GRANT, damaged=[0])),
    ),
    _calls(
        ("PeerService.Init", _INIT),
        (
            "PeerService.Allocate",
            peer_pb.AllocateRequest(
                instance_id="peer", epoch=3, handoff_id="h", token_count=100, session_id=SESSION, **_NAMED
            ),
        ),
        (
            "PeerService.Commit",
            peer_pb.CommitRequest(
                grant_id=GRANT,
                session_id=SESSION,
                indices=[0],
                chunks=[chunk_pb2.GrantedChunk(extent=chunk_pb2.Extent(size_bytes=8192), token_count=32)],
            ),
        ),
        ("PeerService.Release", peer_pb.ReleaseRequest(session_id=SESSION, handoff_id="h")),
    ),
]


class _Channels:
    """The channels of a node that shares none with the peer."""

    def __init__(self) -> None:
        self.access = ReadAccess()

    async def offer(self, _: object) -> None:
        return None

    def serve(self, _: bool) -> None: ...


class _Peer:
    """A connection to a peer that cannot be reached."""

    nixl_metadata = None
    channel = ""

    async def connect(self, *_: object, **__: object) -> None:
        raise Unreachable("no such peer")


class _Host:
    """The node of the engines."""

    conflicts = ()
    is_replaceable = False

    def welcome(self) -> engine_pb.Welcome:
        return engine_pb.Welcome(instance_id="node", epoch=EPOCH, pool_size_bytes=POOL_BYTES)

    def comparison(self) -> dict[str, str]:
        return {"LMKV_CHUNK_SIZE": "256"}

    def engines_changed(self) -> None:
        """Nothing follows."""

    def served_changed(self) -> None:
        """Nothing follows."""

    def replace(self, reason: str) -> None:
        raise AssertionError(reason)

    def snapshot(self) -> tuple[()]:
        return ()


class _Peers:
    """Directory and connections: every peer is known."""

    instance_id = "node"

    async def find_epoch(self, instance_id: str, epoch: int) -> Holder:
        return Holder(instance_id=instance_id, epoch=epoch, peer_address="10.0.0.2:1")

    def get(self, _: Holder) -> _Peer:
        return _Peer()

    def connect(self, *_: object, **__: object) -> None: ...


def run(data: bytes) -> None:
    """Makes the calls of an input."""
    run_virtually(_run(Input(data)))


async def _run(source: Input) -> None:
    tier = HostTier(POOL_BYTES)
    sessions = EngineSessions(tier)
    own = sessions.attach("own", SPEC, 1)
    for number in range(1, 4):
        admit(tier, SPEC, number)
    pipeline: Any = SimpleNamespace(verifier=SimpleNamespace(enabled=True), prefers_nixl=True, codec_for=lambda *_: "")
    peers: Any = _Peers()
    channels: Any = _Channels()
    inspected: Any = SimpleNamespace(inspect=lambda *_: None)
    table = HandoffTable(tier, buffer_bytes=POOL_BYTES // 4)
    async with HandoffReceiver(table, pipeline, peers, sessions, peers) as receiver:
        stack = TierStack(tier, [], receiver)
        orders = OrderRunner(OrderContext(instance_id="node", tier=tier, engines=sessions))
        hints = HintExecutor("node", stack, orders)
        pool: Any = SimpleNamespace(address=4096)
        node = ServedNode(instance_id="node", epoch=EPOCH, tier=tier, pool=pool, engines=sessions)
        peer_service = PeerService(node, channels, inspected, receiver, grant_ttl_seconds=30.0)
        async with orders, hints, peer_service:
            fleet: Any = SimpleNamespace(report_wrong=lambda _: True, is_configured=False)
            engine_service = EngineService(_Host(), sessions, stack, hints, Audits(stack, orders, fleet, sessions))
            await _call(source, {SERVICES[0]: engine_service, SERVICES[1]: peer_service}, tier)
            table.check()
    sessions.detach(own)
    tier.check()
    assert tier.reserved_count == 0, "memory stays reserved"
    assert not any(chunk.holds > chunk.pins for chunk in tier), "a chunk stays held"


async def _call(source: Input, servicers: dict[str, Any], tier: HostTier) -> None:
    known = {SESSION: SESSION, GRANT: GRANT}
    for number, message in source.calls(MAX_CALLS):
        method = METHODS[number % len(METHODS)]
        for name, value in known.items():
            message = message.replace(name.encode(), value.encode())
        parts = message.split(NEXT_PART) if method.client_streaming else [message]
        answer = await call(servicers, method, parts)
        tier.check()
        for response in answer if isinstance(answer, list) else ():
            if isinstance(response, peer_pb.InitResponse):
                known[SESSION] = response.session_id
            elif isinstance(response, peer_pb.AcquireResponse | peer_pb.AllocateResponse):
                grant_id = (
                    response.grant.grant_id if isinstance(response, peer_pb.AcquireResponse) else response.grant_id
                )
                known[GRANT] = grant_id or GRANT
