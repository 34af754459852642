"""Nonsense to every RPC of every service: what comes back is what the protos promise, and the server keeps serving."""

from __future__ import annotations

import asyncio
import random
import string
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from lmkv import rpc
from lmkv.config import CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1 import engine_service_pb2_grpc, registry_service_pb2_grpc
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.operations import explanations
from lmkv_server.coordinator.services.services import SERVICE_NAMES
from lmkv_server.node.node import Node
from tests.attach import events, request
from tests.server.node.cases import chunk_key
from tests.support.node_stub import registration
from tests.support.promised_errors import promises
from tests.support.specs import small_spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

NODE_SERVICES = ("lmkv.v1.EngineService", "lmkv.v1.PeerService")

SPEC = small_spec()
REPORTER = registry_pb.Instance(instance_id="reporter", epoch=1, peer_address="127.0.0.1:1", specs=[SPEC.to_proto()])
TIMEOUT_SECONDS = 40.0
ROUNDS = 100
"""Random requests to each RPC."""
SECRETS_OF_THE_LOG = ("unexpectedly", "Traceback")
"""What a server logs when it met something that it was not made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """A coordinator and a node that an engine of `SPEC` is attached to."""

    coordinator: Coordinator
    node: Node
    addresses: dict[str, str]
    channels: dict[str, grpc.aio.Channel]
    """Both by service."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Servers]:
    """For all tests here: none of them may be able to disturb the next one."""
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder:
        async with running(Path(folder)) as servers:
            yield servers


@asynccontextmanager
async def running(runtime_dir: Path) -> AsyncIterator[Servers]:
    """An engine is attached to the node, and `reporter` is registered at the coordinator."""
    config = NodeConfig(instance_id="node", runtime_dir=str(runtime_dir), max_local_cpu_size=1 / 64)
    async with (
        Coordinator(CoordinatorConfig(port=0, http_port=OFF, lease_ttl=3600.0)) as coordinator,
        Node(config) as node,
    ):
        addresses = dict.fromkeys(SERVICE_NAMES, coordinator.address)
        addresses |= {"lmkv.v1.EngineService": f"unix:{config.engine_socket}", "lmkv.v1.PeerService": node.peer_address}
        channels = {name: rpc.open_channel(address) for name, address in addresses.items()}
        stream: Any = engine_service_pb2_grpc.EngineServiceStub(channels["lmkv.v1.EngineService"]).Attach()  # type: ignore[call-arg]
        await stream.write(request(hello=hello("engine")))
        assert (await stream.read()).events[0].HasField("welcome")
        registry: Any = registry_service_pb2_grpc.RegistryServiceStub(channels["lmkv.v1.RegistryService"])
        await registry.Register(registration(REPORTER), timeout=TIMEOUT_SECONDS)
        yield Servers(coordinator=coordinator, node=node, addresses=addresses, channels=channels)
        stream.cancel()
        for channel in channels.values():
            await channel.close(None)


def hello(engine_id: str, spec: KvSpec = SPEC) -> engine_pb.Hello:
    return engine_pb.Hello(engine_id=engine_id, spec=spec.to_proto(), worker_count=1)


def methods(services: Sequence[str]) -> list[Any]:
    pool = descriptor_pool.Default()
    found = [method for name in services for method in pool.FindServiceByName(name).methods]
    return [pytest.param(method, id=f"{method.containing_service.name}.{method.name}") for method in found]


async def outcome(
    servers: Servers, method: MethodDescriptor, requests: Sequence[bytes], server: str = ""
) -> tuple[grpc.StatusCode, str, str]:
    """Sends requests that are bytes already; status code, reason and text of what came back.

    `server` is one of the services of the server to call, for RPCs that all servers have.
    """
    address = servers.addresses[server or method.containing_service.full_name]
    return await asyncio.to_thread(call, address, method, requests)


def call(address: str, method: MethodDescriptor, requests: Sequence[bytes]) -> tuple[grpc.StatusCode, str, str]:
    """As `outcome`, blocking: gRPC's asyncio client forgets why a stream ended if it was just writing to it.

    The client does not know lmkv's message limit.
    """
    path = f"/{method.containing_service.full_name}/{method.name}"
    options: Any = {"request_serializer": bytes, "response_deserializer": bytes}
    with grpc.insecure_channel(address) as channel:
        try:
            if method.client_streaming:
                list(channel.stream_stream(path, **options)(iter(requests), timeout=TIMEOUT_SECONDS))
            elif method.server_streaming:
                stream: Any = channel.unary_stream(path, **options)(requests[0], timeout=TIMEOUT_SECONDS)
                next(stream, None)  # it may be endless
                stream.cancel()
            else:
                channel.unary_unary(path, **options)(requests[0], timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            meaning = rpc.from_rpc_error(error)
            return error.code(), "" if "grpc_code" in meaning.metadata else meaning.reason, str(error)
    return grpc.StatusCode.OK, "", ""


async def serves(servers: Servers, service: str) -> bool:
    stub = health_pb2_grpc.HealthStub(servers.channels[service])
    name = service if service.startswith("lmkv") else ""
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_SECONDS)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


ALL_METHODS = methods([*SERVICE_NAMES, *NODE_SERVICES])
COMMON_SERVICES = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")


@pytest.mark.parametrize("method", ALL_METHODS)
async def test_a_message_over_the_limit_is_refused_and_the_next_call_served(
    servers: Servers, method: MethodDescriptor
) -> None:
    code, _, text = await outcome(servers, method, [bytes(rpc.MAX_MESSAGE_BYTES + 1)])
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, text
    assert await serves(servers, method.containing_service.full_name)


UNDECODABLE = (b"\xff" * 32, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xff\xff", b"\x08")
"""Bytes that no message type decodes from, or none with text or a message as field 1: see `no_message`."""


def no_message(method: MethodDescriptor) -> bytes:
    """Bytes that the RPC's request cannot be decoded from, the least blatant that there are."""
    kind = message_factory.GetMessageClass(method.input_type)
    for data in reversed(UNDECODABLE):
        try:
            kind.FromString(data)
        except DecodeError:
            return data
    raise AssertionError(f"{method.full_name} decodes all of them")


@pytest.mark.parametrize("method", ALL_METHODS)
async def test_undecodable_bytes_are_an_invalid_argument_and_leave_no_log_line(
    servers: Servers, method: MethodDescriptor, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (UNDECODABLE[0], no_message(method)):
        code, reason, text = await outcome(servers, method, [data])
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_MESSAGE"), text
    assert await serves(servers, method.containing_service.full_name)
    assert not caplog.records


@pytest.mark.parametrize("server", ["lmkv.v1.CacheService", *NODE_SERVICES])
@pytest.mark.parametrize("method", methods(COMMON_SERVICES))
async def test_undecodable_bytes_to_health_and_reflection_leave_no_log_line_either(
    servers: Servers, method: MethodDescriptor, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, reason, text = await outcome(servers, method, [UNDECODABLE[0]], server)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_MESSAGE"), text
    assert await serves(servers, server)
    assert not caplog.records


@pytest.mark.parametrize("server", ["lmkv.v1.CacheService", *NODE_SERVICES])
async def test_health_lists_the_services_of_each_server(
    servers: Servers, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    stub = health_pb2_grpc.HealthStub(servers.channels[server])
    answer = await stub.List(health_pb2.HealthListRequest(), timeout=TIMEOUT_SECONDS)
    assert {"", server} <= answer.statuses.keys()
    assert {one.status for one in answer.statuses.values()} == {health_pb2.HealthCheckResponse.SERVING}
    assert not caplog.records


@pytest.mark.parametrize("method", ALL_METHODS)
async def test_whatever_is_asked_the_answer_is_one_that_the_proto_promises(
    servers: Servers, method: MethodDescriptor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "EXPLAIN_SECONDS", 0.05)  # the reporter carries out no orders
    promised = promises(method)
    source = Nonsense(servers, seed=method.full_name)
    for _ in range(ROUNDS):
        requests = [source.message(method.input_type) for _ in range(source.random.randrange(1, 4))]
        if method.client_streaming and source.random.random() < 0.8:
            source.begin_well(requests[0])
        sent = [request.SerializeToString() for request in requests]
        code, reason, text = await outcome(servers, method, sent)
        assert (code.name, reason) in promised, f"{text}\nasked by {requests}"
    assert await serves(servers, method.containing_service.full_name)
    assert not [record for record in caplog.records if any(word in record.getMessage() for word in SECRETS_OF_THE_LOG)]


class Nonsense:
    """Messages of any type, with values that are wrong, or right in the wrong place."""

    def __init__(self, servers: Servers, seed: str) -> None:
        self.random = random.Random(seed)
        self._epochs = [servers.node.epoch, 1]
        self._texts = ["", "node", "reporter", "engine", "small", "nixl", "x" * 300, "\0", "127.0.0.1:1", "ünïcode"]
        keys = [chunk_key(number) for number in range(4)]
        self._bytes = [b"", b"x", bytes(15), bytes(17), bytes(16 * 5000), SPEC.fingerprint, *keys, b"".join(keys)]

    def message(self, kind: Any, depth: int = 0) -> Message:
        """A message of this type; one field in three is left out."""
        made: Message = message_factory.GetMessageClass(kind)()
        if kind.full_name == "lmkv.v1.KvSpec" and self.random.random() < 0.5:
            made.CopyFrom(SPEC.to_proto())
            return made
        chosen = {oneof.name: self.random.choice(oneof.fields) for oneof in kind.oneofs}
        for field in kind.fields:
            if field.containing_oneof and field is not chosen[field.containing_oneof.name]:
                continue
            if self.random.random() < 0.67 and depth < 4:
                self._fill(made, field, depth)
        return made

    def begin_well(self, request: Message) -> None:
        """Makes a stream's first message one after which its server continues."""
        if isinstance(request, engine_pb.AttachRequest):
            first = engine_pb.Act(hello=hello("".join(self.random.choices(string.ascii_letters, k=12))))
            others = [first, *request.acts]
            del request.acts[:]
            request.acts.extend(others)
        if isinstance(request, report_pb.ReportRequest):
            request.instance_id, request.epoch, request.sequence = "reporter", 1, 1

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type and field.message_type.GetOptions().map_entry:
            for _ in range(self.random.randrange(3)):
                key, value = (self._value(part, depth) for part in field.message_type.fields)
                getattr(made, field.name)[key] = value
        elif field.is_repeated:
            values = [self._value(field, depth) for _ in range(self.random.randrange(4))]
            getattr(made, field.name).extend(values)
        elif field.message_type:
            getattr(made, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(made, field.name, self._value(field, depth))

    def _value(self, field: FieldDescriptor, depth: int) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_MESSAGE:
            return self.message(field.message_type, depth + 1)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return self.random.choice(self._bytes if field.type == FieldDescriptor.TYPE_BYTES else self._texts)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.random.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM):
            return self.random.choice([0, 1, 2, 3, -1, 999, -(2**31), 2**31 - 1])
        if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
            return self.random.choice([0, 1, 2**31])
        return self.random.choice([0, 1, -1, 4096, -(2**63), 2**63 - 1, *self._epochs])


async def test_the_node_serves_health_and_reflection_at_both_its_ends(servers: Servers) -> None:
    for service in NODE_SERVICES:
        assert await serves(servers, service)
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(servers.channels[service])
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        async for answer in stub.ServerReflectionInfo(requests, timeout=TIMEOUT_SECONDS):
            names = {one.name for one in answer.list_services_response.service}
            assert names == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def keyed(**fields: Any) -> dict[str, Any]:
    return {"fingerprint": SPEC.fingerprint, "chunk_keys": [bytes(16)]} | fields


@pytest.mark.parametrize(
    ("name", "request_", "expected"),
    [
        ("Lookup", engine_pb.EngineServiceLookupRequest(**keyed(chunk_keys=[bytes(15)])), "BAD_CHUNK_KEY"),
        ("Lookup", engine_pb.EngineServiceLookupRequest(**keyed(fingerprint=bytes(16))), "MODEL_NOT_FOUND"),
        ("Load", engine_pb.LoadRequest(**keyed(chunk_keys=[bytes(16), bytes(8), bytes(8)])), "BAD_CHUNK_KEY"),
        ("Load", engine_pb.LoadRequest(**keyed(fingerprint=b"")), "MODEL_NOT_FOUND"),
        ("Release", engine_pb.EngineServiceReleaseRequest(engine_id="unknown", lookup_id="1"), "ENGINE_NOT_FOUND"),
    ],
)
async def test_what_an_engine_service_is_asked_wrongly_gets_its_reason(
    servers: Servers, name: str, request_: Message, expected: str
) -> None:
    method = descriptor_pool.Default().FindMethodByName(f"lmkv.v1.EngineService.{name}")
    _, reason, _ = await outcome(servers, method, [request_.SerializeToString()])
    assert reason == expected
    good = engine_pb.EngineServiceLookupRequest(**keyed())
    served = descriptor_pool.Default().FindMethodByName("lmkv.v1.EngineService.Lookup")
    assert (await outcome(servers, served, [good.SerializeToString()]))[0] is grpc.StatusCode.OK


LIE = SPEC.to_proto()
LIE.layer_count += 1


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([request(reserve=1)], "BAD_MESSAGE"),
        ([request(hello=hello(""))], "BAD_MESSAGE"),
        ([request(hello=hello("engine"))], "BAD_MESSAGE"),
        ([request(hello=hello("b")), request(hello=hello("b"))], "BAD_MESSAGE"),
        ([request(hello=[hello("b")] * 2)], "BAD_MESSAGE"),
        ([request(reserve=1, hello=hello("b"))], "BAD_MESSAGE"),
        ([engine_pb.AttachRequest()], "BAD_MESSAGE"),
        ([request(hello=hello("b")), engine_pb.AttachRequest(acts=[engine_pb.Act()])], "BAD_MESSAGE"),
        ([request(hello=engine_pb.Hello(engine_id="b", spec=LIE))], "BAD_KV_SPEC"),
        ([request(hello=hello("b", small_spec(layer_count=4096)))], "BAD_KV_SPEC"),
        (
            [request(hello=hello("b"), lookup=[engine_pb.LookupChunks(chunk_keys=bytes(15))])],
            "BAD_CHUNK_KEY",
        ),
        (
            [request(hello=hello("b"), commit=[engine_pb.CommitChunk(chunk_key=b"short")])],
            "BAD_CHUNK_KEY",
        ),
        (
            [
                request(
                    hello=hello("b"),
                    commit=[engine_pb.CommitChunk(chunk_key=chunk_key(1), parent_key=b"short")],
                )
            ],
            "BAD_CHUNK_KEY",
        ),
        (
            [
                request(
                    hello=engine_pb.Hello(
                        engine_id="b", spec=SPEC.to_proto(), expected_config={"LMKV_MAX_LOCAL_CPU_SIZE": "1TB"}
                    )
                )
            ],
            "CONFIG_CONFLICT",
        ),
    ],
)
async def test_a_stream_that_makes_no_sense_ends_with_its_reason_and_leaves_nothing(
    servers: Servers, messages: list[engine_pb.AttachRequest], expected: str
) -> None:
    used = servers.node.tier.used_bytes
    method = descriptor_pool.Default().FindMethodByName("lmkv.v1.EngineService.Attach")
    _, reason, text = await outcome(servers, method, [message.SerializeToString() for message in messages])
    assert reason == expected, text
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while servers.node.engines.mapped_count > 1:  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.01)
    assert servers.node.tier.used_bytes == used
    assert await serves(servers, "lmkv.v1.EngineService")


async def test_foreign_credits_are_refused_one_by_one_and_the_stream_continues(
    servers: Servers,
) -> None:
    stub = engine_service_pb2_grpc.EngineServiceStub(servers.channels["lmkv.v1.EngineService"])
    stream: Any = stub.Attach()  # type: ignore[call-arg]
    commit = engine_pb.CommitChunk(
        chunk_key=chunk_key(1), offset=4096, size_bytes=SPEC.chunk_bytes, token_count=SPEC.chunk_size
    )
    await stream.write(request(hello=hello("b"), commit=[commit]))
    assert (await stream.read()).events[0].HasField("welcome")
    (rejected,) = events(await stream.read(), "rejected_commit")
    assert rejected.chunk_key == chunk_key(1)
    assert rpc.from_status(rejected.status).reason == "GRANT_NOT_FOUND"
    await stream.write(request(return_credits=[4096], reserve=2))
    (granted,) = events(await stream.read(), "granted")
    assert len(granted.credits) == 2
    stream.cancel()
