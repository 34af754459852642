"""Checks of the coordinator: whether it responds, its clock, the other instances, and whether keys agree.

Clock and keys are tried by a visit: the doctor registers as an instance for a moment, and leaves at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from lmkv import __version__
from lmkv.config import ClientConfig, ConnectorConfig
from lmkv.errors import BadKvSpec, LmkvError, PermissionDenied, Unreachable
from lmkv.internal import OWN_BUILD, PROTOCOL_VERSION, Build, check_builds
from lmkv.internal.v1.report_service_pb2 import ChunkChange, ReportRequest
from lmkv.internal.v1.report_service_pb2_grpc import ReportServiceStub
from lmkv.keys import ChunkKey, as_tokens, chunk_keys, page_keys, root_key
from lmkv.rpc.coordinator_client import CoordinatorConnection
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.units import format_duration
from lmkv.v1.registry_service_pb2 import DeregisterRequest, Instance, RegisterRequest, RegisterResponse
from lmkv_client import Coordinator
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn
from lmkv_client.commands.doctor.host import node_runs
from lmkv_client.commands.fleet import conflicts
from lmkv_client.commands.output import count, engines, format_fill

CLOCK_SECONDS = 1.0
"""Operations and pins expire by the clock; an offset of a second matters."""
ANSWER_SECONDS = 5.0

GOLDEN_TOKENS = (128000, 849, 21435, 279, 26431, 315, 85748, 6636)
GOLDEN_KEYS = ("141c847a97a7cd9cab0be34688a0c2ee", "008228d2386eb5d269de25baacc0d1af")
"""Keys of those tokens, four to a chunk, under the fingerprint 000102...0f; as in `tests/lmkv/golden_keys.json`."""


def check_keys() -> Iterator[Finding]:
    """Whether this host computes the same keys as every other host."""
    keys = chunk_keys(as_tokens(GOLDEN_TOKENS), root_key(bytes(range(16))), 4)
    if [key.hex() for key in keys] == list(GOLDEN_KEYS):
        yield ok("keys", "this host computes the expected keys")
    else:
        yield fail("keys", "this host computes unexpected keys and cannot share chunks; reinstall lmkv")


CONNECT_SECONDS = 3.0
MOST_AT_ONCE = 64
"""Instances that are connected to at the same time."""


async def check_instances(config: ClientConfig) -> list[Finding]:
    """Checks the coordinators and every instance that they know, from this host."""
    findings: list[Finding] = []
    known: dict[str, set[str]] = {}
    instances: dict[str, Instance] = {}
    for address in config.coordinator_address:
        begin = time.monotonic()
        try:
            async with Coordinator(
                address, credentials=config.credentials, timeout_seconds=ANSWER_SECONDS
            ) as coordinator:
                listed = await coordinator.instances()
        except LmkvError as error:
            findings.append(fail("coordinator", f"{address}: {error}"))
            continue
        took = format_duration(time.monotonic() - begin)
        findings.append(ok("coordinator", f"{address} responded in {took}; {count(len(listed), 'instance')}"))
        known[address] = {one.instance_id for one in listed}
        instances |= {one.instance_id: one for one in listed}
    for address, names in known.items():
        if absent := sorted(instances.keys() - names):
            fix = "set coordinator_address to the same coordinators at all nodes"
            findings.append(warn("coordinator", f"{address} does not know {', '.join(absent[:5])}; {fix}"))
    if not instances:
        return findings
    findings.append(check_versions(list(instances.values())))
    findings += [warn("specs", f"{line}; make it equal") for line in conflicts(instances.values())]
    findings += check_audits(list(instances.values()))
    places = asyncio.Semaphore(MOST_AT_ONCE)
    ordered = [instances[name] for name in sorted(instances)]
    return findings + list(await asyncio.gather(*(_check_instance(one, places) for one in ordered)))


def check_audits(instances: Sequence[Instance]) -> Iterator[Finding]:
    """Whether engines have computed chunks again and found them wrong."""
    for instance in instances:
        name, stats = instance.instance_id, instance.stats
        if stats.stopped_models:
            models = ", ".join(stats.stopped_models)
            fix = "docs/operate/runbooks.md#lmkvspecstopped"
            yield fail("audits", f"{name} neither stores nor finds chunks of {models}: too many were wrong; {fix}")
        elif stats.wrong_chunks:
            fix = "docs/operate/runbooks.md#lmkvchunkswrong"
            yield warn("audits", f"engines of {name} have found {count(stats.wrong_chunks, 'wrong chunk')}; {fix}")


async def _check_instance(instance: Instance, places: asyncio.Semaphore) -> Finding:
    """Whether this host reaches an instance as its peers must, and whether it has reported its chunks."""
    usage = ", ".join(f"{tier.tier} {format_fill(tier)}" for tier in instance.tiers)
    state = ", ".join(filter(None, (f"engines: {engines(instance)}", usage)))
    name = instance.instance_id
    if not instance.synced:
        return warn(name, f"still reports its chunks, so that lookups may miss them; {state}")
    if not instance.peer_address:
        return warn(name, f"shares nothing: enable_p2p is false; {state}")
    host, _, port = instance.peer_address.rpartition(":")
    try:
        async with places, asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {CONNECT_SECONDS:.0f} s"
        fix = "set its p2p_host to an address that other hosts reach, and open its p2p_port"
        return fail(name, f"{instance.peer_address} cannot be reached ({why}), so that no host can load from it; {fix}")
    return ok(name, f"{instance.peer_address} responds; {state}")


async def check_fleet(config: ConnectorConfig) -> AsyncIterator[Finding]:
    """The checks that need a coordinator, for each coordinator."""
    if not config.coordinator_address:
        yield warn("coordinator", "not configured: instances share nothing; set coordinator_address")
    for address in config.coordinator_address:
        async for finding in _check_at(address, config):
            yield finding


async def _check_at(address: str, config: ConnectorConfig) -> AsyncIterator[Finding]:
    begin = time.monotonic()
    async with Coordinator(address, credentials=config.credentials, timeout_seconds=ANSWER_SECONDS) as coordinator:
        try:
            instances = await _listed(coordinator)
        except Unreachable as error:
            fix = "start one with `lmkv coordinator`, or set coordinator_address, tls_ca"
            yield fail("coordinator", f"{error}; {fix}")
            return
        except LmkvError as error:
            yield fail("coordinator", str(error))
            return
        took = format_duration(time.monotonic() - begin)
        if instances is None:
            yield ok("coordinator", f"{address} responded in {took}")
            yield warn(
                "instances",
                "tokens of engines do not list instances, so that names, versions and keys are not compared; set "
                "auth_token_file to an admin's token for that",
            )
        else:
            yield ok("coordinator", f"{address} responded in {took}; {count(len(instances), 'instance')}")
            yield check_instance_id(config, instances)
            yield check_versions(instances)
            for finding in check_audits(instances):
                yield finding
        async for finding in _visit(config, coordinator, instances):
            yield finding


async def _listed(coordinator: Coordinator) -> Sequence[Instance] | None:
    """The instances of the fleet; None if the token's role may not list them."""
    try:
        return await coordinator.instances()
    except PermissionDenied:
        return None


def check_instance_id(config: ConnectorConfig, instances: Sequence[Instance]) -> Finding:
    """Whether no other host uses this instance id."""
    name = config.instance_id
    namesake = next((instance for instance in instances if instance.instance_id == name), None)
    if namesake is None:
        return ok("instance_id", f"{name} is free")
    if node_runs(config):
        return ok("instance_id", f"{name} is this host's node, at {namesake.peer_address}")
    return fail(
        "instance_id", f"{name} is in use by a running process at {namesake.peer_address}; set another instance_id"
    )


def check_versions(instances: Sequence[Instance]) -> Finding:
    """Whether all nodes run this version."""
    others = {instance.instance_id: instance.version for instance in instances if instance.version != __version__}
    if not others:
        return ok("versions", f"all nodes run {__version__}")
    said = ", ".join(f"{name} {version or 'an unknown one'}" for name, version in sorted(others.items())[:5])
    return warn("versions", f"this is {__version__}, but others run another version ({said}); update all to one")


def check_specs(instances: Sequence[Instance]) -> tuple[list[KvSpec], Finding | None]:
    """The specs of the fleet, and whether this host derives the same fingerprints."""
    specs: dict[bytes, KvSpec] = {}
    for instance in instances:
        for message in instance.specs:
            try:
                specs[message.fingerprint] = KvSpec.from_proto(message)
            except BadKvSpec as error:
                return [], fail("specs", f"{message.model_name} of {instance.instance_id}: {error}")
    return list(specs.values()), None


async def _visit(
    config: ConnectorConfig, coordinator: Coordinator, instances: Sequence[Instance] | None
) -> AsyncIterator[Finding]:
    specs, misunderstood = check_specs(instances or ())
    if misunderstood:
        yield misunderstood
    try:
        async with _Visitor.register(coordinator.address, config, specs[:1]) as visitor:
            yield visitor.check_clock()
            if specs:
                yield await visitor.check_keys(coordinator, specs[0])
            elif instances is not None and not misunderstood:
                yield ok("agreement", "no engine has registered a model yet: there are no keys to compare")
    except LmkvError as error:
        yield fail("visit", f"a temporary instance was rejected: {error}")


class _Visitor:
    """A temporary instance with at most one chunk, which has no bytes."""

    def __init__(self, config: ConnectorConfig, connection: CoordinatorConnection, instance: Instance) -> None:
        self._config = config
        self._connection = connection
        self._instance = instance
        self.clock_offset_seconds = 0.0
        """The seconds by which the coordinator's clock is ahead of this host's."""

    @classmethod
    @asynccontextmanager
    async def register(cls, address: str, config: ConnectorConfig, specs: Sequence[KvSpec]) -> AsyncIterator[_Visitor]:
        """Registers, and deregisters at the end. Raises `LmkvError`."""
        connection = CoordinatorConnection(address, ANSWER_SECONDS, config.credentials)
        instance = Instance(
            instance_id=f"doctor-{socket.gethostname()[:32]}-{os.getpid()}",
            epoch=time.time_ns(),
            peer_address="127.0.0.1:1",  # no instance fetches its chunk
            specs=[spec.to_proto() for spec in specs],
            version=__version__,
        )
        visitor = cls(config, connection, instance)
        try:
            before = time.time()
            request = RegisterRequest(instance=instance, protocol_version=PROTOCOL_VERSION)
            response: RegisterResponse = await connection.call(connection.registry.Register, request)
            middle = (before + time.time()) / 2
            visitor.clock_offset_seconds = response.instance.register_time.ToNanoseconds() / 1e9 - middle
            try:
                theirs = Build(version=response.version, protocol_version=response.protocol_version)
                check_builds(node=OWN_BUILD, coordinator=theirs)
                yield visitor
            finally:
                goodbye = DeregisterRequest(instance_id=instance.instance_id, epoch=instance.epoch)
                await connection.call(connection.registry.Deregister, goodbye)
        finally:
            await connection.aclose()

    def check_clock(self) -> Finding:
        """Whether coordinator and host agree on the time."""
        offset = self.clock_offset_seconds
        said = f"the coordinator's is {format_duration(abs(offset))} {'ahead' if offset > 0 else 'behind'}"
        if abs(offset) > CLOCK_SECONDS:
            return warn("clock", f"{said}; synchronise both by NTP")
        return ok("clock", said)

    async def check_keys(self, coordinator: Coordinator, spec: KvSpec) -> Finding:
        """Whether the coordinator computes the same key of a prompt as this host."""
        tokens = [random.randrange(spec.vocab_size or 1000) for _ in range(spec.chunk_size)]  # noqa: S311
        secret = self._config.cluster_secret.encode()
        root = root_key(spec.fingerprint, secret=secret)
        if spec.has_page_hashes:
            key = ChunkKey(page_keys(as_tokens(tokens), root, spec.chunk_size)[0])
        else:
            (key,) = chunk_keys(as_tokens(tokens), root, spec.chunk_size)
        await self._report(spec, key)
        answer = await coordinator.lookup(tokens, model_name=spec.model_name)
        if any(holder.instance_id == self._instance.instance_id for holder in answer.holders):
            return ok("agreement", f"coordinator and host compute the same keys for {spec.model_name}")
        return fail(
            "agreement",
            f"coordinator and host compute different keys for {spec.model_name}; set the same cluster_secret on both",
        )

    async def _report(self, spec: KvSpec, key: ChunkKey) -> None:
        """Reports the chunk, and waits until the coordinator has applied the report."""
        change = ChunkChange(tier=HOST, fingerprint=spec.fingerprint, admitted_keys=key)
        report = ReportRequest(
            instance_id=self._instance.instance_id,
            epoch=self._instance.epoch,
            sequence=1,
            snapshot=True,
            snapshot_end=True,
            changes=[change],
        )
        reports: Any = ReportServiceStub(self._connection.channel)  # its types know no stream that is written to
        stream = reports.Report(timeout=ANSWER_SECONDS)
        try:
            await stream.write(report)
            await stream.read()
        except grpc.RpcError as error:
            raise self._connection.to_error(error) from None
        finally:
            stream.cancel()
